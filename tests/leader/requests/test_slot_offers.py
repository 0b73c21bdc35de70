"""Where each host fetches the newest checkpoint in memory that all ranks have anywhere."""

from collections.abc import Mapping, Sequence

from orchestrator.contract.files.checkpoint_names import Made
from orchestrator.contract.memory.peers import CopyPlan, SlotsOffered
from orchestrator.contract.memory.slot_file import Label
from orchestrator.leader.attempt.slot_offers import Layout, copy_plans

LAYOUT = Layout(hosts=("a", "b", "c"), ranks_per_host=2, partners=((1,), (2,), (0,)))
"""Ranks 0 and 1 on a, whose copies are on b, and so on."""


def label(
    rank: int, step: int, attempt: int = 1, config: str = "p", lineage: int = 1, ranks: int = 6
) -> Label:
    made = Made(step=step, attempt=attempt)
    return Label(lineage=lineage, made=made, rank=rank, ranks=ranks, config=config)


def offer(host: str, slots: Sequence[Label], port: int = 9) -> tuple[str, SlotsOffered]:
    return host, SlotsOffered(attempt=2, host=host, port=port, slots=tuple(slots))


def both(first: int, step: int, attempt: int = 1, lineage: int = 1) -> list[Label]:
    return [label(rank, step, attempt, lineage=lineage) for rank in (first, first + 1)]


def plans(
    offers: Mapping[str, SlotsOffered], resumed: tuple[Made, ...] = (), layout: Layout = LAYOUT
) -> Sequence[CopyPlan]:
    addresses = {host: f"addr-{host}" for host in offers}
    return copy_plans(layout, offers, addresses, lineage=1, resumed=resumed, bytes_per_s=None)


def restored(found: Sequence[CopyPlan]) -> set[Made | None]:
    return {plan.restored for plan in found}


def test_a_replaced_host_fetches_from_the_partner_of_the_lost_one() -> None:
    offers = dict(
        [
            offer("a", []),
            offer("b", [*both(2, 7), *both(2, 8), *both(0, 7)]),
            offer("c", [*both(4, 7), *both(4, 8)]),
        ]
    )
    found = plans(offers)
    assert restored(found) == {Made(step=7, attempt=1)}, "no host has step 8 of ranks 0 and 1"
    wanted = found[0].wanted
    assert [one.rank for one in wanted] == [0, 1]
    assert [[peer.host for peer in one.peers] for one in wanted] == [["b"], ["b"]]
    assert wanted[0].peers[0].address == "addr-b"
    assert [one.label.made.step for one in found[1].wanted] == [7, 7]


def test_nothing_is_fetched_if_each_host_has_its_own_or_nobody_has_a_whole_one() -> None:
    own = dict([offer("a", both(0, 7)), offer("b", both(2, 7)), offer("c", both(4, 7))])
    assert all(not plan.wanted for plan in plans(own))
    assert restored(plans({**own, **dict([offer("c", [label(4, 7)])])})) == {None}
    assert restored(plans({**own, **dict([offer("c", both(4, 7), port=0)])})) == {None}
    assert restored(plans({})) == {None}


def test_checkpoints_of_two_attempts_or_configurations_are_never_mixed() -> None:
    def offers(**more: int) -> Mapping[str, SlotsOffered]:
        return dict(
            [offer("a", both(0, 7)), offer("c", both(2, 7)), offer("b", both(4, 7, **more))]
        )

    assert restored(plans(offers())) == {Made(step=7, attempt=1)}
    assert restored(plans(offers(attempt=2))) == {None}
    assert restored(plans(offers(lineage=2))) == {None}
    foreign = dict(offers()) | dict([offer("b", [label(4, 7, config="q"), label(5, 7)])])
    assert restored(plans(foreign)) == {None}


def test_slots_of_a_plan_with_other_ranks_are_not_fetched() -> None:
    larger = dict([offer("b", [*both(2, 7), *both(0, 7)]), offer("c", both(4, 7))])
    larger |= dict([offer("d", both(6, 7))])
    assert restored(plans(larger)) == {None}
    without_first = dict([offer("b", both(2, 7)), offer("c", both(4, 7)), offer("d", both(6, 7))])
    assert restored(plans(without_first)) == {None}


def test_steps_that_were_trained_again_since_are_not_fetched() -> None:
    slots = [*both(2, 6), *both(2, 7)]
    offers = dict([offer("b", [*both(0, 6), *both(0, 7), *slots]), offer("c", [])])
    offers |= dict([offer("a", [*both(4, 6), *both(4, 7)])])
    assert restored(plans(offers)) == {Made(step=7, attempt=1)}
    resumed = (Made(step=6, attempt=2),)
    assert restored(plans(offers, resumed)) == {Made(step=6, attempt=1)}


def test_a_host_of_a_former_attempt_may_have_the_only_copy() -> None:
    offers = dict([offer("a", []), offer("b", both(2, 7)), offer("c", both(4, 7))])
    offers |= dict([offer("excluded", both(0, 7))])
    (first, *_) = plans(offers)
    assert [peer.host for one in first.wanted for peer in one.peers] == ["excluded", "excluded"]


def test_each_host_learns_its_partners_and_whose_copies_it_keeps() -> None:
    offers = dict([offer("a", []), offer("b", [], port=0), offer("c", [])])
    found = plans(offers)
    assert [[peer.host for peer in plan.partners] for plan in found] == [[], ["c"], ["a"]]
    assert [plan.holds for plan in found] == [(4, 5), (0, 1), (2, 3)]


def test_slots_of_another_number_of_ranks_come_to_any_host_of_the_attempt() -> None:
    """Two of four hosts are lost, and the job goes on with one rank on each of the others."""
    four = [label(rank, 7, ranks=4) for rank in range(4)]
    offers = dict([offer("a", four[:1]), offer("b", [four[1], four[0]]), offer("spare", four[2:])])
    two = Layout(hosts=("a", "b"), ranks_per_host=1, partners=((1,), (0,)))
    found = plans(offers, layout=two)
    assert restored(found) == {Made(step=7, attempt=1)}
    assert [[one.rank for one in plan.wanted] for plan in found] == [[2], [3]]
    assert found[0].wanted[0].peers[0].host == "spare"
    del offers["spare"]
    assert all(not plan.wanted for plan in plans(offers, layout=two)), "not complete anywhere"
