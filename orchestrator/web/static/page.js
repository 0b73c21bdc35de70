"use strict";
// Keeps a page as fresh as the server's events. The server has escaped every text in the rows that
// it sends, as in the page itself; this script adds none of its own, except numbers.

const RETRY_MS = 5000; // after the server refused or was away
const SILENT_MS = 15000; // without a word from the server the page counts as old
const live = document.getElementById("live");
const path = document.body.dataset.live;
const waiting = new Map(); // rows that replace text which the user is selecting
let source = null;
let heard = 0;

function say(text, kind) {
  live.textContent = text;
  live.className = kind;
}

function made(html) {
  const template = document.createElement("template");
  template.innerHTML = html;
  return template.content.firstElementChild;
}

function isSelected(element) {
  const selection = document.getSelection();
  return selection !== null && !selection.isCollapsed && selection.containsNode(element, true);
}

function update(name, change) {
  const box = document.getElementById(name);
  if (!box) { // the page has become another one: the job was removed, or it came back
    location.reload();
    return;
  }
  const rows = new Map([...box.children].map((row) => [row.dataset.key, row]));
  for (const [key, html] of Object.entries(change.set || {})) {
    const old = rows.get(key);
    if (old && isSelected(old)) {
      waiting.set(`${name} ${key}`, () => update(name, { set: { [key]: html } }));
      continue;
    }
    waiting.delete(`${name} ${key}`);
    const row = made(html);
    if (old) {
      if (old.outerHTML === row.outerHTML) continue;
      const open = [...old.querySelectorAll("details")].map((one) => one.open);
      row.querySelectorAll("details").forEach((one, at) => { one.open = open[at] || false; });
      old.replaceWith(row);
    }
    rows.set(key, row);
  }
  if (change.order) arrange(box, change.order.map((key) => rows.get(key)).filter(Boolean));
}

// Rows that keep their place are not touched, so that a selection in them stays.
function arrange(box, rows) {
  let at = box.firstElementChild;
  for (const row of rows) {
    if (row === at) at = at.nextElementSibling;
    else box.insertBefore(row, at);
  }
  while (at) {
    const gone = at;
    at = at.nextElementSibling;
    gone.remove();
  }
}

function take(message) {
  const change = JSON.parse(message);
  document.title = change.title;
  for (const [name, rows] of Object.entries(change.blocks)) update(name, rows);
  if (change.charts) draw(change.charts);
  search();
}

// Fleet: rows without the text of the filter are hidden.
const filter = document.getElementById("filter");

function search() {
  if (!filter) return;
  const wanted = filter.value.toLowerCase();
  for (const row of document.querySelectorAll("#jobs > tr")) {
    row.hidden = wanted !== "" && !row.textContent.toLowerCase().includes(wanted);
  }
}

if (filter) filter.addEventListener("input", search);

function connect() {
  if (!path || source) return;
  source = new EventSource(path);
  source.addEventListener("change", (event) => take(event.data));
  source.addEventListener("at", (event) => {
    heard = Date.now();
    say(event.data, "on");
    for (const again of [...waiting.values()]) again();
  });
  source.addEventListener("problem", (event) => {
    heard = Date.now();
    say(event.data, "off");
  });
  source.addEventListener("error", () => {
    if (source && source.readyState === EventSource.CLOSED) {
      disconnect();
      say("not live: the server refused; trying again", "off");
      setTimeout(connectIfSeen, RETRY_MS);
    }
  });
}

function disconnect() {
  if (source) source.close();
  source = null;
}

// A tab that nobody sees costs the server nothing.
function connectIfSeen() {
  if (document.hidden) disconnect();
  else connect();
}

document.addEventListener("visibilitychange", connectIfSeen);
setInterval(() => {
  if (path && heard && Date.now() - heard > SILENT_MS) {
    const since = Math.round((Date.now() - heard) / 1000);
    say(`not live: nothing heard for ${since} s`, "off");
    if (source && source.readyState !== EventSource.CONNECTING) {
      disconnect();
      connectIfSeen();
    }
  }
}, 1000);
connectIfSeen();

// Charts of one job: loss and speed by step, with restarts and checkpoints as vertical lines.
const charts = {};
let points = null;

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function short(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  return `${+value.toPrecision(4)}`;
}

function marks(chart) {
  const { ctx, bbox } = chart;
  const line = (step, height, name) => {
    const x = Math.round(chart.valToPos(step, "x", true)) + 0.5;
    if (x < bbox.left || x > bbox.left + bbox.width) return;
    ctx.beginPath();
    ctx.strokeStyle = colour(name);
    ctx.moveTo(x, bbox.top + bbox.height - height);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  };
  ctx.save();
  ctx.lineWidth = devicePixelRatio;
  for (const step of points.saves) line(step, 7 * devicePixelRatio, "--ink");
  for (const step of points.restarts) line(step, bbox.height, "--bad");
  ctx.restore();
}

const WHOLE = Array.from({ length: 10 }, (_, digits) => [1, 2, 5].map((n) => n * 10 ** digits)).flat();

function options(box, title, label, stroke) {
  const axis = { stroke: () => colour("--soft"), grid: { stroke: () => colour("--faint"), width: 1 }, ticks: { show: false }, font: "11px ui-monospace, monospace" };
  return {
    title, width: box.clientWidth || 480, height: 170,
    cursor: { sync: { key: "steps" }, points: { size: 6 }, drag: { x: true, y: false } },
    scales: { x: { time: false } },
    series: [
      { label: "step" },
      { label, stroke: () => colour(stroke), width: 1.5, points: { show: false }, value: (_, value) => (value == null ? "–" : short(value)) },
    ],
    axes: [
      // No step has a fraction.
      { ...axis, size: 28, incrs: WHOLE, values: (_, steps) => steps.map(short) },
      { ...axis, size: 52, values: (_, values) => values.map(short) },
    ],
    hooks: { draw: [marks] },
  };
}

function draw(given) {
  points = given;
  const kept = points.saves.length ? ", tick: checkpoint" : "";
  const again = points.restarts.length ? ", red line: restart" : "";
  show("chart-loss", points.loss, `loss by step${kept}${again}`, "loss", "--busy");
  show("chart-speed", points.speed, `${points.unit} by step`, points.unit, "--good");
}

function show(id, data, title, label, stroke) {
  const box = document.getElementById(id);
  if (!box || !data.length) return;
  const known = charts[id];
  if (known && known.title === title) {
    known.plot.setData(data);
    return;
  }
  box.style.display = "block"; // it was hidden while it was empty, and an empty box has no width
  if (known) known.plot.destroy();
  charts[id] = { title, plot: new uPlot(options(box, title, label, stroke), data, box) };
}

function resize() {
  for (const { plot } of Object.values(charts)) {
    plot.setSize({ width: plot.root.parentElement.clientWidth, height: 170 });
  }
}

addEventListener("resize", resize);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const { plot } of Object.values(charts)) plot.redraw();
});
