"""A script that moves the loss scale by itself: `_overflow_buf`, `update_scale`, `_has_overflow`.

`delay_overflow_check=True` leaves it to the script, as NVIDIA's BERT recipe does.
"""

import gc
import importlib

import pytest
import torch
from torch import nn

import ampatch

INF = float("inf")
LEVELS = ["O1", "O2"]


def start(amp, level="O2", **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    return model, optimizer


def block(amp, model, optimizer, factor=1.0, **options) -> None:
    loss = model(torch.ones(2, 4)).float().sum() * 0.01 * factor
    with amp.scale_loss(loss, optimizer, **options) as scaled:
        scaled.backward()


def weights(model) -> list[torch.Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def moved(model, before) -> bool:
    return not all(map(torch.equal, weights(model), before))


def scaler_of(amp):
    return amp._amp_state.loss_scalers[0]


def by_hand(amp, model, optimizer, buffer) -> bool:
    """The recipe's step: scale, (reduce,) unscale, ask the scaler; returns whether it stepped."""
    amp_C, apex_C = importlib.import_module("amp_C"), importlib.import_module("apex_C")
    scaler = scaler_of(amp)
    scale = scaler.loss_scale()
    grads = [p.grad for p in amp.master_params(optimizer) if p.grad is not None]
    views = apex_C.unflatten(torch.empty(sum(grad.numel() for grad in grads)), grads)
    buffer.zero_()
    amp_C.multi_tensor_scale(65536, buffer, [grads, views], scale / 2)
    buffer.zero_()
    amp_C.multi_tensor_scale(65536, buffer, [views, grads], 1.0 / scale)
    scaler._overflow_buf = buffer  # as there, it is never taken back: the recipe has a slip
    had_overflow = scaler.update_scale()
    if not had_overflow:
        optimizer.step()
    for param in model.parameters():
        param.grad = None
    return not had_overflow


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bad", [0, 1])
def test_the_recipe_moves_the_scale_once_a_step(amp, level, bad):
    """The overflow is in the first or in the last micro-batch."""
    model, optimizer = start(amp, level)
    buffer, scales = torch.zeros(1, dtype=torch.int), []
    scaler_of(amp)._scale_seq_len = 3
    for step in range(8):
        before = weights(model)
        for micro in range(2):
            factor = INF if (step, micro) == (2, bad) else 1.0
            block(amp, model, optimizer, factor, delay_overflow_check=True)
        stepped = by_hand(amp, model, optimizer, buffer)
        assert stepped == moved(model, before) == (step != 2)
        scaler = scaler_of(amp)
        saved = amp.state_dict()["loss_scaler0"]
        assert saved["loss_scale"] == scaler.loss_scale() == scaler._loss_scale
        assert saved["unskipped"] == scaler._unskipped
        scales.append((scaler.loss_scale() / 2**16, scaler._unskipped))
    #                 clean     clean   overflow, three clean: doubled,       again
    assert scales == [(1, 1), (1, 2), (0.5, 0), (0.5, 1), (0.5, 2), (1, 0), (1, 1), (1, 2)]
    assert ampatch.step_counts(optimizer) == (7, 0, 0)  # no step was skipped by ours


DELAYED, INF_DELAYED = ({"factor": f, "delay_overflow_check": True} for f in (1.0, INF))
BEFORE_A_STEP = {  # blocks, other calls, or a buffer's value; the answers; moved; 2**scale
    "never asked": ([INF_DELAYED], [], False, 15),
    "asked after a usual block": ([{"factor": INF}, "ask"], [True], False, 14),  # as in apex
    # who mends gradients says so in the buffer; who steps all the same, steps
    "mended": ([INF_DELAYED, "mend", 0, "ask"], [False], True, 16),
    "said to overflow": ([DELAYED, 1, "ask"], [True], True, 15),
    "not asked again": ([INF_DELAYED, "mend", "ask", DELAYED], [True], True, 15),
    # a step before the question has looked, and moved the scale
    "asked after two steps": ([DELAYED, "step", "ask"] * 2, [False] * 2, True, 16),
    "asked after two overflows": ([INF_DELAYED, "step", "ask"] * 2, [True] * 2, False, 14),
    # a usual block shows its overflow until the next
    "seen": ([{"factor": INF}, "see", "step", "see", {}, "see"], [True, True, False], True, 15),
    "replaced, and not overruled by a later block": (
        ["replace", {"factor": INF}, {}], [], False, 15
    ),
}  # fmt: skip


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", BEFORE_A_STEP)
def test_what_decides_a_step(amp, level, name):
    calls, expected, has_moved, exponent = BEFORE_A_STEP[name]
    model, optimizer = start(amp, level)
    scaler, before, answers = scaler_of(amp), weights(model), []
    own = scaler.update_scale
    for call in calls:
        if call == "mend":
            for param in model.parameters():
                param.grad.nan_to_num_(0.5, 0.5, 0.5)
        elif call == "replace":
            scaler.update_scale = lambda: own()
        elif call == "ask":
            answers.append(scaler.update_scale())
        elif call == "see":
            answers.append(scaler_of(amp)._has_overflow)
        elif call == "step":
            optimizer.step()
            optimizer.zero_grad()
        elif isinstance(call, int):
            scaler._overflow_buf = torch.full((1,), call, dtype=torch.int)
        else:
            block(amp, model, optimizer, **call)
    optimizer.step()
    assert answers == expected and moved(model, before) is has_moved
    assert scaler.loss_scale() == 2.0**exponent


@pytest.mark.parametrize("level", LEVELS)
def test_without_a_buffer_of_its_own_update_scale_knows_what_blocks_found(amp, level):
    """In all of them since the last update: apex forgot those before the last one."""
    model, optimizer = start(amp, level)
    scaler = scaler_of(amp)
    for factors, overflows in (
        ((1, 1), False),
        ((INF, 1), True),
        ((1, 1), False),
        ((1, INF), True),
    ):
        optimizer.zero_grad()
        for factor in factors:
            block(amp, model, optimizer, factor, delay_overflow_check=True)
        assert scaler._has_overflow is overflows and bool(scaler._overflow_buf.item()) is overflows
        assert scaler.update_scale() is overflows
    assert scaler.loss_scale() == 2.0**14
    scaler.clear_overflow_state()
    assert not scaler._has_overflow and scaler._overflow_buf.item() == 0
    scaler._has_overflow = True
    assert scaler.update_scale() is True and scaler.loss_scale() == 2.0**13


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("calls_apexs", [True, False], ids=["around", "instead"])
def test_a_replaced_update_scale_is_asked_as_each_block_ends(amp, level, calls_apexs):
    """Around the scaler's own, or instead of it with apex's rule written out."""
    model, optimizer = start(amp, level)
    scaler = scaler_of(amp)
    scaler._scale_seq_len = 2
    own, asked = scaler.update_scale, []

    def around() -> bool:
        asked.append(own())
        return asked[-1]

    def instead() -> bool:
        asked.append(bool(scaler._overflow_buf.item()))
        scaler._unskipped = 0 if asked[-1] else scaler._unskipped + 1
        if asked[-1] or scaler._unskipped == scaler._scale_seq_len:
            scaler._loss_scale *= 0.5 if asked[-1] else 2
            scaler._unskipped = 0
        return asked[-1]

    scaler.update_scale = around if calls_apexs else instead
    scales = []
    for factor in (INF, 1.0, INF, 1.0, 1.0, 1.0):
        before = weights(model)
        optimizer.zero_grad()
        block(amp, model, optimizer, factor)
        optimizer.step()
        assert moved(model, before) == (factor != INF)
        assert ampatch.step_was_skipped(optimizer) == (factor == INF)
        scales.append(scaler.loss_scale() / 2**16)
    assert asked == [True, False, True, False, False, False]
    assert scales == [0.5, 0.5, 0.25, 0.25, 0.5, 0.5]
    block(amp, model, optimizer, INF, delay_overflow_check=True)
    assert len(asked) == 6  # the script's turn
    block(amp, model, optimizer, delay_unscale=True)
    assert len(asked) == 6
    del scaler.update_scale
    optimizer.zero_grad()
    block(amp, model, optimizer)
    assert len(asked) == 6


def test_each_loss_has_its_own(amp):
    model, optimizer = start(amp, num_losses=2)
    block(amp, model, optimizer, INF, loss_id=1, delay_overflow_check=True)
    first, second = amp._amp_state.loss_scalers
    assert not first._has_overflow and second._has_overflow
    assert second.update_scale() and not first.update_scale()
    assert (first.loss_scale(), second.loss_scale()) == (2.0**16, 2.0**15)
    assert (first._unskipped, second._unskipped) == (1, 0)


@pytest.mark.parametrize("kind", ["of the session", "of its own"])
def test_unscaling_by_hand(amp, kind):
    start(amp)
    scaler = scaler_of(amp)
    if kind == "of its own":
        from apex.amp.scaler import LossScaler

        scaler = LossScaler("dynamic")
    assert scaler.has_fused_kernel and scaler.loss_scale() == 2.0**16
    grads = [torch.full((2,), 2.0**17), torch.full((), 2.0**16)]
    out = [torch.empty(2), torch.empty(())]
    scaler.unscale(grads, out, scaler.loss_scale())
    assert [grad.flatten().tolist() for grad in out] == [[2.0, 2.0], [1.0]]
    scaler.unscale(grads, out, None, scale_override=2.0)
    assert out[1].item() == 2.0**15
    with pytest.raises(ampatch.AmpatchError, match=r"not available.*amp\.scale_loss adds"):
        scaler.unscale_with_stashed(grads, grads, out)
    assert scaler._overflow_buf.item() == 0
    scaler.unscale([torch.tensor([INF])], [torch.empty(1)])
    assert scaler._overflow_buf.item() == 1
    assert scaler.update_scale() and scaler._has_overflow and scaler.loss_scale() == 2.0**15
    before = out[1].clone()
    scaler.unscale(grads, out)  # nothing after an overflow
    assert torch.equal(out[1], before)
    scaler.clear_overflow_state()
    scaler.unscale(grads, out)
    assert out[1].item() == 2.0


def test_a_scaler_of_its_own_follows_apexs_rule():
    from apex.amp.scaler import LossScaler

    scaler = LossScaler("dynamic", init_scale=8.0, scale_window=3, max_loss_scale=16.0)
    scales = []
    for overflow in (False, False, False, False, False, False, True, True, False):
        scaler.clear_overflow_state()
        scaler._overflow_buf.fill_(int(overflow))
        assert scaler.update_scale() is overflow
        scales.append(scaler.loss_scale())
    assert scales == [8, 8, 16, 16, 16, 16, 8, 4, 4]
    assert (scaler._unskipped, scaler._scale_seq_len, scaler._max_loss_scale) == (1, 3, 16.0)
    for _ in range(60):
        scaler._has_overflow = True
        scaler.update_scale()
    assert scaler.loss_scale() == 2.0**-24  # never 0
    static = LossScaler(128.0)
    static._overflow_buf.fill_(1)
    assert not static.dynamic and static.update_scale() is False


# Several calls of initialize


def session(amp, with_optimizer: bool, **options):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if with_optimizer else None
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0, **options)
    return model, optimizer


def scale_in_use(amp, model, optimizer) -> float:
    optimizer.zero_grad()
    loss = model(torch.ones(1, 2)).sum() * 1e-3
    with amp.scale_loss(loss, optimizer) as scaled:
        ratio = (scaled / loss.float()).item()
        scaled.backward()
    return round(ratio)


@pytest.mark.parametrize("order", [[True, False], [False, True], [False, True, False]])
def test_models_without_an_optimizer_add_no_scaler(amp, order, caplog):
    sessions = [session(amp, has_optimizer) for has_optimizer in order]
    model, optimizer = sessions[order.index(True)]
    ampatch.set_loss_scale(4096.0)
    assert scale_in_use(amp, model, optimizer) == 4096
    assert ampatch.loss_scale() == 4096 == ampatch.state_dict()["loss_scaler0"]["loss_scale"]
    assert [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers] == [4096]
    assert amp.state_dict() == ampatch.state_dict()
    for package, scale in ((amp, 128.0), (ampatch, 256.0)):
        package.load_state_dict({"loss_scaler0": {"loss_scale": scale, "unskipped": 5}})
        assert scale_in_use(amp, model, optimizer) == scale
    amp._amp_state.loss_scalers[0]._loss_scale = 512.0
    assert scale_in_use(amp, model, optimizer) == 512
    assert not caplog.records


def test_several_sessions_with_optimizers_are_one_list_the_newest_first(amp, caplog):
    first, _, last = session(amp, True, num_losses=2), session(amp, False), session(amp, True)
    for number, scaler in enumerate(amp._amp_state.loss_scalers):
        scaler._loss_scale = 2.0**number
    saved = amp.state_dict()
    assert [entry["loss_scale"] for entry in saved.values()] == [1, 2, 4]
    assert list(saved) == ["loss_scaler0", "loss_scaler1", "loss_scaler2"]
    assert scale_in_use(amp, *last) == 1 and scale_in_use(amp, *first) == 2
    amp.load_state_dict({name: {"loss_scale": 64.0, "unskipped": 0} for name in saved})
    assert scale_in_use(amp, *last) == 64 == scale_in_use(amp, *first)
    amp.load_state_dict(saved)
    assert scale_in_use(amp, *last) == 1 and scale_in_use(amp, *first) == 2
    # apex's list has the scalers of one initialize, for all optimizers
    old = {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 0}}
    amp.load_state_dict(old)
    assert [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers] == [8, 8, 4]
    with pytest.raises(ValueError, match="loss_scaler7"):
        amp.load_state_dict({"loss_scaler7": old["loss_scaler0"]})
    del last, scaler  # the session ends with its model and optimizer
    gc.collect()
    assert [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers] == [8, 4]


def test_deactivate_ends_the_entries_of_all_sessions_before_but_the_newest(amp):
    first, last = session(amp, True), session(amp, True)
    session(amp, False)  # a momentum encoder
    amp._amp_state.loss_scalers[1]._loss_scale = 8.0
    amp._amp_state.loss_scalers[0]._loss_scale = 4.0
    amp._amp_state.handle._deactivate()
    assert [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers] == [4]
    assert scale_in_use(amp, *last) == 4 and scale_in_use(amp, *first) == 8  # both go on
    third = session(amp, True)
    assert [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers] == [2.0**16]
    assert scale_in_use(amp, *third) == 2**16


def test_init_beside_initialize_adds_no_entry_and_hides_no_setting(amp):
    """espnet calls `init` last: its handle has a loss scale that nothing is scaled by."""
    model, optimizer = session(amp, True)
    handle = amp.init()
    amp._amp_state.loss_scalers[0]._loss_scale = 16.0
    assert scale_in_use(amp, model, optimizer) == 16 and len(amp.state_dict()) == 1
    assert amp._amp_state.opt_properties.opt_level == "O2"
    assert amp.amp._DECORATOR_HANDLE is handle is not amp._amp_state.handle
    handle._deactivate()
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 16


def test_without_a_session_state_dict_says_so_and_models_alone_have_scalers_too(amp):
    for call in (amp.state_dict, lambda: amp.load_state_dict({})):
        with pytest.raises(ampatch.AmpatchError, match="no ampatch session is open"):
            call()
    session(amp, False)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**16
    assert len(amp._amp_state.loss_scalers) == 1


def test_a_buffer_that_is_given_back_shows_what_blocks_find(amp):
    model, optimizer = start(amp)
    scaler, own = scaler_of(amp), torch.zeros(1, dtype=torch.int)
    of_blocks = scaler._overflow_buf
    scaler._overflow_buf = own
    block(amp, model, optimizer, INF, delay_overflow_check=True)
    assert scaler._overflow_buf is own and own.item() == 0
    assert scaler.update_scale() is False
    scaler._overflow_buf = of_blocks
    block(amp, model, optimizer, INF, delay_overflow_check=True)
    assert scaler._overflow_buf is of_blocks and of_blocks.item() == 1
    assert scaler.update_scale() is True


@pytest.mark.parametrize("first", ["usual", "delayed"])
def test_update_scale_forgets_what_delayed_blocks_of_its_scaler_left_and_nothing_else(amp, first):
    model, optimizer = start(amp, num_losses=2)
    before = weights(model)
    usual, delayed = {"factor": INF, "loss_id": 1}, {"delay_overflow_check": True}
    for options in (usual, delayed) if first == "usual" else (delayed, usual):
        block(amp, model, optimizer, **options)
    assert scaler_of(amp).update_scale() is False
    optimizer.step()
    assert not moved(model, before)  # loss 1 has decided
    assert [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers] == [2.0**16, 2.0**15]


def test_update_scale_may_be_replaced_in_the_class_and_of_a_static_scale(amp, monkeypatch):
    from apex.amp.scaler import LossScaler

    model, optimizer = start(amp, loss_scale=64.0)
    before, asked = weights(model), []
    assert scaler_of(amp).loss_scale() == 64.0
    monkeypatch.setattr(LossScaler, "update_scale", lambda self: asked.append(self) or True)
    block(amp, model, optimizer)
    optimizer.step()
    assert asked == [scaler_of(amp)] and not moved(model, before)


def test_a_pickled_scaler_goes_on(amp):
    import pickle

    from apex.amp.scaler import LossScaler

    scaler = LossScaler("dynamic", init_scale=256.0, scale_factor=4.0, scale_window=2)
    scaler.update_scale()
    unpickled = pickle.loads(pickle.dumps(scaler))
    assert (scaler.update_scale(), unpickled.update_scale()) == (False, False)
    assert scaler.loss_scale() == unpickled.loss_scale() == 1024.0
    state = {name: value for name, value in scaler.__getstate__().items() if name != "scale_factor"}
    apexs = LossScaler.__new__(LossScaler)
    apexs.__setstate__({**state, "_has_overflow": False, "_overflow_buf": torch.zeros(1)})
    assert apexs.loss_scale() == 1024.0 and apexs._scale_seq_len == 2
