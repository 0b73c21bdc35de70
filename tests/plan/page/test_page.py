"""The page of a plan: its structure, its text, and how a browser lays it out."""

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from orchestrator.app.planning.decisions import Wish, decision_of
from orchestrator.app.planning.page import write_page
from orchestrator.app.planning.plans import plan_spec, with_prices
from orchestrator.cli import cli
from orchestrator.contract.mesh import Mesh
from orchestrator.contract.plan import Plan
from orchestrator.errors import SpecError
from orchestrator.plan.page.markup import VOID, element
from orchestrator.plan.page.page import Page, html_of
from orchestrator.plan.page.rank_map import DRAWN, SQUARES
from orchestrator.plan.show.explain import prices_of
from tests.plan.show.test_explain import PLAN

EXAMPLES = Path(__file__).parents[3] / "examples"
H100 = EXAMPLES / "inventories" / "h100.yaml"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)


class Document(HTMLParser):
    """Elements with their attributes; fails on a tag that is not closed where it must be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.texts.append(data)

    def all(self, tag: str, class_: str = "") -> list[dict[str, str | None]]:
        wanted = set(class_.split())
        return [
            attributes
            for name, attributes in self.elements
            if name == tag and wanted <= set((attributes.get("class") or "").split())
        ]


def written(tmp_path: Path, example: str, *overrides: str) -> str:
    on = None if example == "quickstart" else H100
    planned = plan_spec(EXAMPLES / f"{example}.yaml", overrides, {}, on)
    decision = decision_of(planned, {}, on, Wish(tokens=15e12, price=2.5))
    path = tmp_path / "plan.html"
    size = write_page(path, planned, decision)
    assert size == path.stat().st_size
    return path.read_text()


def page_of(plan: Plan, job: str = "demo") -> str:
    return html_of(Page(job=job, plan=plan, decision=None, memory=(), hardware=()))


@pytest.mark.parametrize("example", ["llama3-8b", "llama3-70b", "quickstart"])
def test_the_page_has_every_section_and_needs_nothing_else(tmp_path: Path, example: str) -> None:
    text = written(tmp_path, example)
    found = Document(text)
    told = " ".join(found.texts)
    for title in (
        "What the job takes",
        "Memory of a rank over a step",
        "Where the time of a step goes",
        "Ranks on hosts and switches",
        "What each number rests on",
    ):
        assert title in told
    # No script, and nothing that a browser would load.
    assert not found.all("script") + found.all("link") + found.all("img") + found.all("iframe")
    assert not re.search(r"(src|href|url\(|@import|on\w+)\s*=?\s*[\"'(]?\s*https?:", text)
    assert not any(name.startswith("on") for _, each in found.elements for name in each)
    policy = [meta["content"] for meta in found.all("meta") if "http-equiv" in meta]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]
    assert "prefers-color-scheme: dark" in text


def test_memory_is_drawn_item_by_item_below_the_limit(tmp_path: Path) -> None:
    found = Document(written(tmp_path, "llama3-8b"))
    items = [one for one in found.texts if re.fullmatch(r"(?!peak)[a-z]+ [\d.]+ [GM]iB", one)]
    assert len(found.all("polygon")) == len(items) > 8
    assert len(found.all("line", "limit")) == 1
    assert "a device has 79.1 GiB" in found.texts
    assert sum(one.startswith("every rank: peak ") for one in found.texts) == 1


def test_the_kinds_of_pipeline_ranks_have_a_chart_each(tmp_path: Path) -> None:
    text = written(tmp_path, "llama3-8b", "parallel.pp=2", "parallel.pipeline.schedule=1f1b")
    found = Document(text)
    assert len(found.all("svg")) == 2
    assert sum(one.startswith("pp stage ") for one in found.texts) >= 2


def test_a_button_for_each_axis_colours_the_ranks(tmp_path: Path) -> None:
    text = written(tmp_path, "llama3-8b", "parallel.tp=2", "parallel.dp_shard=2")
    found = Document(text)
    buttons = [one["id"] for one in found.all("input")]
    assert [one["for"] for one in found.all("label")] == buttons
    assert sum("checked" in one for one in found.all("input")) == 1
    ranks = [one for one in found.all("i") if (one["title"] or "").startswith("rank ")]
    assert len(ranks) == 8
    assert ranks[3]["title"] == "rank 3, dp_replicate=0, dp_shard=1, tp=1"
    # Each class of a rank has a colour.
    for one in ranks:
        for name in (one["class"] or "").split():
            assert f":checked ~ .groups .{name}," in text


def plan_on(hosts: int, ranks: int) -> Plan:
    names = tuple(f"host-{number}" for number in range(hosts))
    return replace(
        PLAN,
        mesh=Mesh(dp_shard=hosts, tp=ranks),
        hosts=names,
        ranks_per_host=ranks,
        switches={name: ("spine-1", f"leaf-{number // 16}") for number, name in enumerate(names)},
    )


@pytest.mark.parametrize(("hosts", "squares"), [(64, 64), (2048, 2048), (12_800, 3200)])
def test_many_ranks_are_folded_into_hosts(hosts: int, squares: int) -> None:
    found = Document(page_of(plan_on(hosts, 8)))
    drawn = found.all("i")
    assert hosts * 8 > DRAWN
    assert len(drawn) == squares + 8 <= SQUARES + 8
    assert (drawn[1]["title"] or "").startswith(f"host-{hosts // squares}: ranks ")
    assert len(found.all("div", "dots")) == hosts / 16
    # One host is drawn with its ranks.
    assert found.texts.count("host-0") == 1


def test_the_largest_page_stays_below_a_megabyte_and_a_half() -> None:
    assert len(page_of(plan_on(12_800, 8))) < 1_500_000


HOSTILE = "<img src=x onerror=alert(1)>\"'</style><script>\u202e\x1b[31m"


def test_names_never_become_markup() -> None:
    hosts = (HOSTILE, "host-1")
    named = replace(
        PLAN,
        hosts=hosts,
        switches=dict.fromkeys(hosts, ("</span><script>alert(2)</script>",)),
        notes=(HOSTILE,),
        profile=HOSTILE,
        methods={"data": HOSTILE},
    )
    text = page_of(named, job=HOSTILE)
    found = Document(text)
    assert not found.all("script") + found.all("img")
    assert len(found.all("style")) == 1
    assert "\u202e" not in text
    assert "\x1b" not in text
    assert any("<img src=x onerror=alert(1)>" in one for one in found.texts)


def test_an_own_program_has_a_page_of_its_ranks() -> None:
    own = replace(
        PLAN, memory=None, time=None, communication=(), alternatives=(), mesh=Mesh(dp_replicate=4)
    )
    found = Document(page_of(own))
    assert [one["title"] for one in found.all("i")] == [f"rank {rank}" for rank in range(4)]
    assert "Memory of a rank over a step" not in found.texts


def test_text_inside_elements_is_escaped_and_markup_is_not() -> None:
    inner = element("b", "<")
    assert element("p", inner, "&", [inner], class_="a_b", data_x='"', gone=None) == (
        '<p class="a_b" data-x="&quot;"><b>&lt;</b>&amp;<b>&lt;</b></p>'
    )


def test_the_page_names_what_fixed_keys_cost_as_the_text_does(tmp_path: Path) -> None:
    planned = plan_spec(EXAMPLES / "llama3-8b.yaml", (), {}, H100)
    priced = with_prices(planned).plan
    assert priced.prices
    path = tmp_path / "plan.html"
    words = ("plan", str(EXAMPLES / "llama3-8b.yaml"), "--inventory", str(H100))
    done = CliRunner().invoke(cli, [*words, "--html", str(path), "--no-history"])
    assert done.exit_code == 0, done.output
    text = path.read_text()
    assert all(said in text for said in prices_of(priced))


def test_a_page_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    planned = plan_spec(EXAMPLES / "quickstart.yaml", (), {})
    with pytest.raises(SpecError, match="cannot be written: No such file"):
        write_page(tmp_path / "none" / "plan.html", planned, None)


PROBE = """<!doctype html><body><script>
const sizes = [400, 800, 1280], lines = [];
let open = sizes.length;
for (const width of sizes) {
  const frame = document.createElement("iframe");
  frame.style.width = width + "px"; frame.style.height = "900px";
  frame.onload = () => {
    const page = frame.contentDocument, root = page.documentElement;
    const look = one => frame.contentWindow.getComputedStyle(one).backgroundColor;
    const rank = page.querySelectorAll(".groups i")[1], before = look(rank);
    const buttons = page.querySelectorAll("input");
    buttons[0].click();
    const chart = page.querySelector("svg").getBoundingClientRect();
    lines.push([width, root.scrollWidth <= root.clientWidth,
      chart.width > Math.max(600, width * 0.8), before !== look(rank),
      page.querySelectorAll("script").length].join(" "));
    if (--open === 0) document.body.textContent = "PROBED " + lines.sort().join("; ") + ".";
  };
  frame.src = "plan.html";
  document.body.append(frame);
}
</script>"""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
def test_a_browser_shows_it_without_sideways_scrolling_and_recolours_the_ranks(
    tmp_path: Path,
) -> None:
    written(tmp_path, "llama3-8b", "parallel.tp=2", "parallel.dp_shard=2")
    (tmp_path / "probe.html").write_text(PROBE)
    done = subprocess.run(
        [
            str(BROWSER),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--allow-file-access-from-files",
            "--virtual-time-budget=20000",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom",
            (tmp_path / "probe.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert (
        "PROBED 1280 true true true 0; 400 true true true 0; 800 true true true 0." in done.stdout
    )
