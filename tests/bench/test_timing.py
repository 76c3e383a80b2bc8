"""Timing in turns: who runs how often and in which order, and what is reported."""

from jax_extractor.bench.timing import Contestant, interleaved_medians


def test_every_round_runs_all_in_an_order_of_its_own(monkeypatch):
    """On a clock that each run moves on by its own cost: exact medians by name."""
    clock, calls = [0.0], []

    def contestant(name, cost):
        def call():
            calls.append(name)
            clock[0] += cost

        return Contestant(name, call)

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    costs = {"a": 1.0, "b": 2.0, "c": 4.0}
    assert interleaved_medians([contestant(*item) for item in costs.items()], 20) == costs
    assert calls[:3] == ["a", "b", "c"]  # to warm up
    rounds = [tuple(calls[n : n + 3]) for n in range(3, len(calls), 3)]
    assert len(rounds) == 20
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert len(set(rounds)) == 6  # every order comes up
