"""What measured curves are taken for, where some are missing and where threads share the work."""

from __future__ import annotations

from msgspec import structs

from autotune_offload.paths.rates import Rates
from tests.decide.test_cost_model import measurements


def test_a_curve_that_was_not_measured_is_replaced_by_its_relative() -> None:
    """Without pinned copies the pageable ones stand in, and `measured` says so."""
    gbps = [10.0] * 11
    whole = measurements(gbps)
    known = structs.replace(
        whole, transfers=tuple(t for t in whole.transfers if t.kind == "d2h" and t.memory == "pageable")
    )
    rates = Rates(known, shares_host_memory=False)
    assert rates.line("h2d", "pinned") == rates.line("d2h", "pageable")
    assert not rates.measured("h2d", "pinned")
    assert rates.measured("d2h", "pageable")


def test_one_point_is_no_curve() -> None:
    """Where the time was enough for one size only, the other direction of the link tells more, in the same memory."""
    gbps = [10.0, 5.0, 30.0, 10.0, 25.0, 12.0, 6.0, 5.0, 500.0, 12.0, 6.0]
    whole = measurements(gbps)
    pinned = [t for t in whole.transfers if (t.kind, t.memory, t.state) == ("d2h", "pinned", "warm")]
    short = structs.replace(whole, transfers=tuple(t for t in whole.transfers if t not in pinned[1:]))
    rates = Rates(short, shares_host_memory=False)
    assert len(pinned) > 1 and rates.line("d2h", "pinned") == rates.line("h2d", "pinned")
    alone = Rates(structs.replace(whole, transfers=(pinned[0],)), shares_host_memory=False)
    assert alone.line("d2h", "pinned").seconds(pinned[0].bytes) > 0


def test_threads_add_up_to_what_torchs_own_pool_reaches() -> None:
    """And never to more."""
    gbps = [10.0, 1.0, 10.0, 10.0, 10.0, 20.0, 6.0, 1.0, 50.0, 20.0, 6.0]
    rates = Rates(measurements(gbps), shares_host_memory=True)
    assert [round(rates.copy_rate(n) / 1e9) for n in (0, 1, 2, 8)] == [20, 6, 12, 20]
    assert [round(rates.cast_rate("host", n) / 1e9) for n in (0, 1, 2, 8)] == [20, 6, 12, 20]
    assert round(rates.cast_rate("device", 8) / 1e9) == 50
