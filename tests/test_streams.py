"""What a step gives to its side stream, in which order, and what is held for it.  Whether the streams wait for each other only
a GPU shows: tests/test_streams_and_graphs.py."""

import weakref
from contextlib import contextmanager

import pytest
import torch
from switch_matrix import PAGE, SCENARIOS, Admit, Duel, Step, make_worker, small_model, with_switches

from dspark_model import ops
from dspark_model.context_latents import ContextLatents
from dspark_model.serving_config import Layout
from dspark_model.streams import SideStream

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OVERLAP = ("fused_prologue", "overlap_context_projection")


def test_what_forks_read_is_held_until_the_join():
    side = SideStream(torch.device(DEVICE))
    first, second = torch.ones(3, device=DEVICE), torch.ones(3, device=DEVICE)
    held = [weakref.ref(first), weakref.ref(second)]
    with side.fork(first):
        pass
    with side.fork(second):
        pass
    del first, second
    assert all(reference() is not None for reference in held)
    side.join()
    assert all(reference() is None for reference in held)


class Recorder(SideStream):
    """Notes its joins, and says whether work is given to the side stream."""

    def __init__(self, device: torch.device, log: list[str]):
        super().__init__(device)
        self.log, self.where, self.reads = log, "main", []

    @contextmanager
    def fork(self, *reads: torch.Tensor):
        self.reads.append(len(reads))
        with super().fork(*reads):
            self.where = "side"
            yield
            self.where = "main"

    def join(self):
        super().join()
        self.log.append("join")


def recorded(monkeypatch, switches: tuple[str, ...], script: list) -> Recorder:
    """Follow a script, and note what its last step does on which stream."""
    model = small_model(device=DEVICE)
    duel = Duel(*(make_worker(model, with_switches(names), Layout.LAYER_MAJOR) for names in ((), switches)))
    duel.run(script[:-1])
    side = duel.fast._side = Recorder(model.device, [])
    places = [(type(model), name) for name in ("context_product", "norm_context", "embed_block", "decode_block")]
    places += [(ops, name) for name in ("context_rows", "step_prologue", "context_store")]
    places.append((ContextLatents, "__call__"))

    def note(place, name: str) -> None:
        work, label = getattr(place, name), "latents" if name == "__call__" else name

        def noted(*arguments, **options):
            side.log.append(f"{side.where} {label}")
            return work(*arguments, **options)

        monkeypatch.setattr(place, name, noted)

    for place, name in places:
        note(place, name)
    duel.fast.step(duel._input(script[-1]))
    return side


def test_only_products_and_latents_stand_behind_the_projection(monkeypatch):
    """The places of the context rows come before their latents and wait for no product; what follows the verdict neither."""
    side = recorded(monkeypatch, OVERLAP, SCENARIOS["steady"](1, PAGE)[:3])
    assert side.log == [
        "side context_product", "side norm_context", "main context_rows", "side latents", "main step_prologue",
        "main embed_block", "join", "main context_store", "main decode_block",
    ]  # fmt: skip
    assert side.reads == [0, 1]


@pytest.mark.parametrize("switches", [(), ("overlap_context_projection",)], ids=["plain", "chunks"])
def test_a_step_with_chunks_or_without_overlap_has_one_stream(monkeypatch, switches):
    keys = [Admit(0), Admit(1), Step(prefill={0: (0, 5, True)})]
    last = Step(accepts=((0, 2),), prefill={1: (0, 3, False)} if switches else {})
    side = recorded(monkeypatch, switches, [*keys, last])
    assert side.reads == [] and all(entry.startswith("main") for entry in side.log)
    assert side.log.count("main context_store") == 1 + bool(switches)


def test_nothing_is_embedded_where_nothing_is_drafted(monkeypatch):
    side = recorded(monkeypatch, (), [Admit(0), Step(prefill={0: (0, 3, False)})])
    projected = ["main context_product", "main norm_context", "main latents"]
    assert side.log == [*projected, "main step_prologue", "main context_store"]
