"""Situations: kinds of models, calls, outputs and hooks."""

import torch
import torch.nn.functional as F
from situations import PLAIN, Block, batches, mlp, mse, network, plain_loop, situation
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


@situation()
def a_conv_net(amp):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)),
        nn.Conv2d(1, 4, 2, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 2),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(4, 2),
    )
    model, optimizer = amp.start(net)
    for number, (x, y) in enumerate(batches(4)):
        torch.manual_seed(number)
        amp.step(mse(model(x), y), optimizer)
        if number == 1:
            model.to(memory_format=torch.channels_last)
    model.eval()
    with torch.no_grad():
        amp.record(model(x))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = kind(4, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x):
        lengths = torch.tensor([3, 2, 2], device="cpu")  # torch wants them there
        packed = pack_padded_sequence(x.view(3, -1, 4)[:, :3], lengths, batch_first=True)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.head(out)


@situation("O1 O2", against="FP32", within=2e-2, cases={"lstm": nn.LSTM, "gru": nn.GRU})
@situation("O2 O3", halves="bf16", cases={"rnn": nn.RNN})
def packed(amp, case):
    """Four steps move weights by up to 0.2."""
    model, optimizer = amp.start(Recurrent(case))
    for x, y in batches(4, rows=9):
        amp.step(mse(model(x).flatten(0, 1), y), optimizer)


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words):
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        return self.head(self.layer(self.embed(words), src_mask=mask, is_causal=True))


@situation("O1 O2", against="FP32", within=3e-2)
def a_tied_language_model(amp):
    """Against FP32: without its mask the loss is 0.1 off, and weights move by up to 0.3."""
    model, optimizer = amp.start(Language(), PLAIN)
    for seed in range(4):
        words = torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(seed))
        out = model(words)[:, :-1].flatten(0, 1).float()
        amp.step(F.cross_entropy(out, words[:, 1:].flatten()), optimizer)


@situation()
def a_model_that_returns_its_loss(amp):
    class Whole(Block):
        def forward(self, x, *, target):
            return {"loss": (super().forward(x).float() - target.float()).square().mean()}

    model, optimizer = amp.start(Whole())
    for x, y in batches(4):
        amp.step(model(x, target=y)["loss"], optimizer)


@situation()
def a_method_and_a_part_called_from_outside(amp):
    model, optimizer = amp.start(Block())
    for x, y in batches(3):
        is_half = amp.by_hand and amp.level == "O3"
        with amp.parts(model):
            hidden = model.encode(x.to(amp.half) if is_half else x)
            out = model.head(hidden)
        amp.record(hidden)
        amp.step(mse(out, y) + mse(model(x), y), optimizer)


class Saves(nn.Linear):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "kept"] = self.weight.detach().float().sum() * 0 + 5


@situation()
def state_dicts_that_the_user_changes(amp):
    """By hooks, and in `_save_to_state_dict`: what these make of FP32 values is what is saved."""
    torch.manual_seed(0)
    model, optimizer = amp.start(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), Saves(8, 2)))

    def extend(module, state, prefix, meta):
        state["extra"] = torch.ones(1) if amp.level == "O3" else state["0.weight"] * 2

    model.register_state_dict_post_hook(extend)
    model[2].register_state_dict_post_hook(
        lambda module, state, prefix, meta: state.__delitem__(prefix + "bias")
    )
    for x, y in batches(3):
        amp.step(mse(model(x), y), optimizer)
        state = model.state_dict()
        assert list(state) == ["0.weight", "0.bias", "2.weight", "2.kept", "extra"], list(state)
        amp.record(*state.values())


@situation(within=3e-2)
def forward_hooks_of_the_users(amp):
    """From before `initialize` and from after it.  Whether they see half or FP32 is open; one that
    is not run is 0.3 away."""
    net = mlp()
    net.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    net[0].register_forward_hook(lambda module, args, out: out - 1)
    model, optimizer = amp.start(net)
    model[0].register_forward_hook(lambda module, args, out: out * 2)
    model[2].register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    model.register_forward_hook(lambda module, args, out: out * 2)
    plain_loop(amp, model, optimizer)


@network("O1 O2", PLAIN)
class FrozenBody(Block):
    def forward(self, x):
        with torch.no_grad():
            x = self.encode(x)
        return self.head(x)


@network("O1", PLAIN)
class FirstUsedWithoutGradients(Block):
    """The half copy of the `no_grad` part must not serve the part that is trained."""

    def forward(self, x):
        with torch.no_grad():
            start = self.encode(x)
        with torch.inference_mode():
            self.encode(x)
        return self.head(self.encode(x) + start)


@situation(within=5e-3)
def a_forward_that_is_a_generator(amp):
    """What runs after `forward` has returned is cast too; copies of weights are its own."""

    class Steps(Block):
        def forward(self, x):
            for _ in range(2):
                x = self.encode(x)
                yield self.head(x)

    model, optimizer = amp.start(Steps())
    for x, y in batches(3):
        with amp.half_weights(model), amp.casts():
            first, second = model(x)
        amp.step(mse(first, y) + mse(second, y), optimizer)


@network("O1", within=2e-3)
class Recursive(Block):
    """Three uses of a weight may add up in half in another order; a lost one is 0.02 away."""

    def forward(self, x, depth=2):
        x = self.encode(x)
        return self(x, depth - 1) if depth else self.head(x)


@network("O1")
class WeightMadeInTheForward(Block):
    """A hypernetwork: the weight of one layer is another one's output."""

    def forward(self, x):
        weight = self.second(self.first.weight[:2])
        return F.linear(F.linear(torch.tanh(self.first(x)), weight), torch.eye(2))


@network("O1")
class ViewsAndSlicesOfWeights(Block):
    def forward(self, x):
        x = F.linear(x, self.first.weight[:2])
        return F.linear(x, self.second.weight.t()[:2, :2]) + self.head(F.pad(x, (0, 2)))
