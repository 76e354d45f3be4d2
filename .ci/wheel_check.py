"""Run from an empty directory and environment: the installed wheel is found by name and works."""

import sys
from importlib.metadata import files
from pathlib import Path

import torch


class Model(torch.nn.Module):
    """The smallest model with a head and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(64, 16)
        self.head = torch.nn.Linear(16, 64, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.head(self.embed(ids)), ids)


def main() -> None:
    """Compile by name with no import of ours, then compare with eager."""
    torch.manual_seed(0)
    model, ids = Model(), torch.arange(32)
    expected = model(ids)
    loss = torch.compile(model, backend="memeff", options={"memeff.inner": "aot_eager"})(ids)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0.0)

    import memeff_compile

    assert Path(memeff_compile.__file__).is_relative_to(sys.prefix), memeff_compile.__file__
    assert any(str(file) == "memeff_compile/py.typed" for file in files("memeff_compile") or ())
    report = memeff_compile.last_report()
    print(report)
    assert report.rewrites("fuse_linear_cross_entropy") == 1


if __name__ == "__main__":
    main()
