"""Laws of the scheduler under everything at once: random requests with shared prompts and pictures,
any chunk and page size, pools so small that requests are preempted, aborts, failing steps and
pictures, results that come late. `Rig` checks every invariant after every move and, at the end, all
outputs."""

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.engine.scheduler_rig import Rig, Setting, chat

TEXT = st.integers(1, 9)
IMAGE = st.tuples(st.integers(0, 3), st.integers(1, 9))
PARTS = st.lists(st.one_of(TEXT, IMAGE), min_size=1, max_size=4)
SETTINGS = st.builds(
    Setting,
    num_pages=st.sampled_from([16, 20, 40]),
    page_size=st.sampled_from([1, 3, 16, 64]),
    max_running=st.integers(1, 5),
    max_step_tokens=st.integers(1, 20),
    max_model_len=st.sampled_from([16, 40, 64]),
    encoder_patches=st.sampled_from([18, 40]),
    encoder_tokens=st.sampled_from([0, 4, 9, 20]),
    patches_beside=st.sampled_from([0, 1, 20]),
    lag=st.integers(0, 3),
    prefix_cache=st.booleans(),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Moves of a server and of its clients, in any order."""

    @initialize(setting=SETTINGS)
    def begin(self, setting: Setting) -> None:
        self.rig = Rig(setting)
        self.count = 0

    @rule(
        parts=PARTS,
        max_tokens=st.integers(1, 12),
        stop=st.frozensets(st.integers(0, 49), max_size=6),
        min_tokens=st.integers(0, 3),
        group=st.sampled_from(["", "", "a", "b", "alike"]),
    )
    def add(self, parts, max_tokens, stop, min_tokens, group):  # noqa: ANN001
        if group:
            parts = {"a": [6, (0, 5), 2], "b": [11], "alike": [11]}[group]
        self.count += 1
        made = chat(
            f"r{self.count}",
            *parts,
            max_tokens=max_tokens,
            stop=stop,
            min_tokens=min(min_tokens, max_tokens),
            group="" if group == "alike" else group,
            seed=self.count,
        )
        if len(made.prompt_token_ids) < self.rig.setting.context:
            self.rig.add(made)

    @precondition(lambda self: len(self.rig.flights) < 2)
    @rule()
    def launch(self) -> None:
        self.rig.launch()

    @precondition(lambda self: self.rig.flights)
    @rule()
    def absorb(self) -> None:
        self.rig.absorb()

    @rule(steps=st.integers(1, 6))
    def steps(self, steps: int) -> None:
        for _ in range(steps):
            self.rig.step()

    @precondition(lambda self: self.count)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.rig.abort(f"r{data.draw(st.integers(1, self.count))}")

    @precondition(lambda self: self.rig.flights)
    @rule()
    def fail(self) -> None:
        self.rig.fail()

    @rule(name=st.integers(0, 3), length=st.integers(1, 9))
    def spoil(self, name: int, length: int) -> None:
        self.rig.device.bad_images = {chat("", (name, length)).images[0].identity}

    @rule()
    def poison(self) -> None:
        self.rig.device.nan_steps = {len(self.rig.plans)}

    @invariant()
    def no_more_than_allowed(self) -> None:
        s = self.rig.setting
        assert self.rig.scheduler.num_running <= s.max_running
        assert self.rig.device.max_patches <= s.encoder_patches

    def teardown(self) -> None:
        self.rig.run()
        self.rig.check_outputs()
        for name in self.rig.requests:
            assert self.rig.reason(name) is not None


SchedulerMachine.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
test_scheduler_machine = SchedulerMachine.TestCase
