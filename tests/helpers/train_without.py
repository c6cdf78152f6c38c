"""Training with ampatch under a torch that lacks private names: `train_without.py [plain] NAME...`

It prints what `train` returned.  "plain": the model has no recurrent layer.
"""

import sys

import private_names
import torch
import torch.nn.functional as F


def train(recurrent: bool = True, half: str = "bfloat16") -> list[float]:
    import ampatch

    originals = [F.linear, torch.exp, torch.Tensor.matmul]
    losses = []
    for level in ("O1", "O2", "O3"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), Head(recurrent))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
        settings = {"dtype": half, "loss_scale": "dynamic", "init_scale": 1024.0, "verbosity": 0}
        ampatch.initialize(model, optimizer, opt_level=level, **settings)
        x = torch.randn(8, 4)
        for factor in (1.0, 1.0, float("inf")):
            loss = model(x).float().square().mean() * factor
            with ampatch.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert ampatch.step_counts(optimizer)[:2] == (2, 1)
        saved = model.state_dict()
        assert (saved["0.weight"].dtype is not torch.float32) is (level == "O3")
        model.load_state_dict(saved)
        with ampatch.report(model):
            losses.append(model(x).float().square().mean().item())
        ampatch.deactivate()
        assert [F.linear, torch.exp, torch.Tensor.matmul] == originals
        assert model(x).dtype is torch.float32
    return losses


class Head(torch.nn.Module):
    def __init__(self, recurrent: bool) -> None:
        super().__init__()
        self.recurrent = torch.nn.LSTM(4, 4) if recurrent else None
        self.encoder = torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.recurrent is None else self.recurrent(x)[0]
        return self.linear(self.encoder(x[:, None])[:, 0])


if __name__ == "__main__":
    kind, lost = ("plain", sys.argv[2:]) if sys.argv[1:2] == ["plain"] else ("", sys.argv[1:])
    private_names.take_away(lost)
    print(train(recurrent=kind != "plain"))
