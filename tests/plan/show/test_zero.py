"""The table of the levels of ZeRO."""

from msgspec.structs import replace

from orchestrator.plan.show.zero import ZeroTable, describe_zero, zero_json

TABLE = ZeroTable(
    model_type="llama",
    parameters=4_000_000_000,
    devices=8,
    optimizer="adamw",
    device_bytes=20 * 10**9,
)


def test_the_json_has_every_level_of_every_policy() -> None:
    """A 4B model in bfloat16 on 8 ranks needs 48, 20, 13 and 6 GB (Rajbhandari et al. 2020)."""
    _, master, bfloat16 = zero_json(TABLE)["policies"]
    assert [level["zero"] for level in bfloat16["levels"]] == [0, 1, 2, 3]
    assert [level["total"] / 1e9 for level in bfloat16["levels"]] == [48, 20, 13, 6]
    assert bfloat16["levels"][1] == {
        "zero": 1,
        "weights": 8e9,
        "gradients": 8e9,
        "master": 0,
        "optimizer": 4e9,
        "total": 20e9,
    }
    # The optimizer's part is 12 bytes with master weights: 4 for them, and 8 for two moments.
    assert [level["total"] / 1e9 for level in master["levels"]] == [64, 22, 15, 8]


def test_a_checkpoint_has_14_bytes_per_parameter_with_master_weights() -> None:
    told = describe_zero(replace(TABLE, parameters=70_000_000_000))
    assert "2 + 2 + 4 + 8 = 16; without gradients, as in a checkpoint: 14, 980 GB" in told


def test_rounded_moments_take_half() -> None:
    rounded = replace(TABLE, state_dtype="bfloat16")
    wide, narrow = (zero_json(one)["policies"][0]["levels"][0] for one in (TABLE, rounded))
    assert narrow["optimizer"] == wide["optimizer"] / 2
    assert "adamw with bfloat16 moments on" in describe_zero(rounded)


def test_a_cell_that_exceeds_the_device_is_marked() -> None:
    rows = [line for line in describe_zero(TABLE).splitlines() if line.startswith("  ZeRO-")]
    assert "".join("!" if line.endswith("!") else "." for line in rows) == "!!!.!!..!..."
