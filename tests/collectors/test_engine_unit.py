"""What the engine promises when vLLM misbehaves; vLLM itself is a stub here."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from torchrl_copc.collectors.engine import (
    EngineDeadError,
    EngineError,
    EngineRequestError,
    EngineStartError,
    VLLMEngine,
    VLLMEngineConfig,
    WeightUpdate,
    WeightUpdateError,
    check_engine_config,
    make_engine,
)

vllm = pytest.importorskip("vllm")


class StubLLM:
    """Records the calls of an update; ``broken`` steps raise, ``hanging`` ones never return."""

    errored = False
    output_handler = None

    def __init__(self, broken: tuple[str, ...] = (), hanging: tuple[str, ...] = ()) -> None:
        self.calls: list[str] = []
        self._broken, self._hanging = broken, hanging

    async def _step(self, name: str) -> None:
        self.calls.append(name)
        if name in self._broken:
            raise RuntimeError(f"{name} is broken")
        if name in self._hanging:
            await asyncio.Event().wait()

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", True)
        await self._step("pause")

    async def start_weight_update(self) -> None:
        await self._step("start")

    async def update_weights(self, request: Any) -> None:
        await self._step("update")

    async def finish_weight_update(self, weight_version: str) -> None:
        await self._step("finish")

    async def resume_generation(self) -> None:
        await self._step("resume")

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        await asyncio.Event().wait()
        yield

    def shutdown(self, timeout: float | None = None) -> None:
        self.calls.append("shutdown")


def run(llm: StubLLM, scenario: Callable[[VLLMEngine], Coroutine[Any, Any, None]]) -> None:
    class Engine(VLLMEngine):
        def _build(self) -> None:
            self._llm = llm

    async def main() -> None:
        engine = Engine(VLLMEngineConfig(model="m", step_timeout=0.2))
        engine._failed = asyncio.get_running_loop().create_future()
        engine._updates = asyncio.Lock()
        engine._llm, engine._vocab_size = llm, 10
        await scenario(engine)
        await engine.shutdown()
        await engine.shutdown()
        assert llm.calls.count("shutdown") == 1

    asyncio.run(main())


def test_an_update_takes_its_steps_in_order_and_times_each() -> None:
    llm = StubLLM()

    async def scenario(engine: VLLMEngine) -> None:
        seconds = await engine.update_weights(WeightUpdate(), 3)
        assert list(seconds) == llm.calls == ["pause", "start", "update", "finish", "resume"]

    run(llm, scenario)


@pytest.mark.parametrize("step", ["start", "update", "finish", "resume"])
@pytest.mark.parametrize("kind", ["broken", "hanging"])
def test_a_failed_step_is_named_and_ends_every_request(step: str, kind: str) -> None:
    llm = StubLLM(**{kind: (step,)})

    async def scenario(engine: VLLMEngine) -> None:
        running = asyncio.create_task(engine.generate([1], max_tokens=1, request_id="r"))
        await asyncio.sleep(0)
        with pytest.raises(WeightUpdateError, match=f"step '{step}'") as caught:
            await engine.update_weights(WeightUpdate(), 3)
        assert caught.value.step == pickle.loads(pickle.dumps(caught.value)).step == step
        if kind == "hanging":
            assert "engine.step_timeout=0.2 s" in str(caught.value)
        with pytest.raises(EngineDeadError, match="unusable after a failed weight update"):
            await running
        with pytest.raises(EngineDeadError, match="unusable"):
            await engine.generate([1], max_tokens=1, request_id="r")

    run(llm, scenario)


def test_a_turn_ends_only_where_asked_and_on_the_text_that_the_environment_sees() -> None:
    asked: list[Any] = []

    class LLM(StubLLM):
        async def generate(self, prompt: Any, params: Any, **kwargs: Any) -> Any:
            asked.append(params)
            token = SimpleNamespace(logprob=-1.0)
            span = SimpleNamespace(version="0", start=0, end=1)
            output = SimpleNamespace(
                token_ids=[2], logprobs=[{2: token}], weight_versions=[span], finish_reason="stop"
            )
            yield SimpleNamespace(outputs=[output])

    async def scenario(engine: VLLMEngine) -> None:
        await engine.generate([1], max_tokens=4, stop_strings=["</answer>"], request_id="r")
        await engine.generate([1], max_tokens=4, stop_token_ids=[2], request_id="s")
        text, ids = asked
        assert text.ignore_eos and ids.ignore_eos, "the end-of-sequence id is an ordinary one unless named"
        assert text.stop == ["</answer>"] and text.detokenize and not text.skip_special_tokens
        assert ids.stop_token_ids == [2] and not ids.stop
        assert text.include_stop_str_in_output

    run(LLM(), scenario)


def test_a_failed_pause_leaves_the_engine_running_with_its_old_weights() -> None:
    llm = StubLLM(broken=("pause",))

    async def scenario(engine: VLLMEngine) -> None:
        with pytest.raises(WeightUpdateError, match="step 'pause'"):
            await engine.update_weights(WeightUpdate(), 3)
        assert llm.calls == ["pause", "resume"]
        llm._broken = ()
        await engine.update_weights(WeightUpdate(), 4)

    run(llm, scenario)


def test_a_pause_that_cannot_be_undone_makes_the_engine_unusable() -> None:
    llm = StubLLM(broken=("pause",), hanging=("resume",))

    async def scenario(engine: VLLMEngine) -> None:
        with pytest.raises(WeightUpdateError, match="step 'pause'"):
            await engine.update_weights(WeightUpdate(), 3)
        with pytest.raises(EngineDeadError, match=r"pause is broken.*not resumed.*engine\.step_timeout"):
            await engine.generate([1], max_tokens=1, request_id="r")

    run(llm, scenario)


def test_two_updates_never_overlap() -> None:
    llm = StubLLM()

    async def scenario(engine: VLLMEngine) -> None:
        await asyncio.gather(
            engine.update_weights(WeightUpdate(), 1), engine.update_weights(WeightUpdate(), 2)
        )
        assert llm.calls == ["pause", "start", "update", "finish", "resume"] * 2

    run(llm, scenario)


def test_a_turn_whose_budget_does_not_fit_the_engine_is_refused_rather_than_cut() -> None:
    async def scenario(engine: VLLMEngine) -> None:
        with pytest.raises(
            EngineRequestError, match=r"2 tokens and max_tokens=1023 exceed engine\.max_model_len=1024"
        ):
            await engine.generate([1, 2], max_tokens=1023, request_id="r")

    run(StubLLM(), scenario)


def test_a_start_that_hangs_ends_with_its_stage_and_the_setting() -> None:
    release = threading.Event()

    class Engine(VLLMEngine):
        def _build(self) -> None:
            release.wait(10)

    engine = Engine(VLLMEngineConfig(model="m", start_timeout=0.2))
    with pytest.raises(EngineStartError, match=r"stage 'load the model'.*engine\.start_timeout=0\.2 s"):
        asyncio.run(engine.start())
    release.set()


def test_a_start_that_fails_shows_the_cause() -> None:
    class Engine(VLLMEngine):
        def _build(self) -> None:
            raise RuntimeError("no memory for the cache")

    with pytest.raises(EngineStartError, match=r"engine\.model='m'.*no memory for the cache"):
        asyncio.run(Engine(VLLMEngineConfig(model="m")).start())


def test_calls_before_the_start_say_so() -> None:
    with pytest.raises(EngineError, match="not started"):
        asyncio.run(make_engine(VLLMEngineConfig(model="m")).generate([1], max_tokens=1, request_id="r"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_p": 0.9}, r"engine\.top_p=0\.9"),
        ({"top_k": 50}, r"engine\.top_k=50"),
        ({"model": ""}, r"engine\.model is empty"),
        ({"dtype": "int8"}, r"engine\.dtype='int8'"),
        ({"weight_transfer": "http"}, r"engine\.weight_transfer='http'"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    config = VLLMEngineConfig(**{"model": "m", **settings})
    with pytest.raises(ValueError, match=message):
        make_engine(config)
    with pytest.raises(ValueError, match=message):
        check_engine_config(config)
    assert pickle.loads(pickle.dumps(config)) == config
