"""Choosing BLAS threads by what steps really took."""

from amem.run.threads import ALL, ThreadChoice


class Machine:
    """A clock, and steps that take as long as the machine's load says."""

    def __init__(self):
        self.now = 0.0
        self.seconds = {1: 0.1, ALL: 0.05}
        self.choice = ThreadChoice(lambda: self.now)
        self.steps = []

    def step(self):
        threads = self.choice.pick()
        self.now += self.seconds[threads]
        self.choice.record(threads, self.seconds[threads])
        self.steps.append(threads)

    def share_of(self, threads, n=200):
        self.steps.clear()
        for _ in range(n):
            self.step()
        return self.steps.count(threads) / n


def test_the_faster_choice_is_used_almost_always():
    """On free cores that is all threads, on busy ones a single one."""
    machine = Machine()
    assert machine.share_of(ALL) > 0.9
    machine.seconds = {1: 0.1, ALL: 1.0}
    machine.share_of(1)
    assert machine.share_of(1) > 0.95


def test_a_change_of_load_is_noticed():
    """When the cores are free again, so are the threads."""
    machine = Machine()
    machine.seconds = {1: 0.1, ALL: 1.0}
    machine.share_of(1)
    machine.seconds = {1: 0.1, ALL: 0.05}
    for _ in range(20):
        machine.share_of(ALL)
    assert machine.share_of(ALL) > 0.9
