"""Training under each framework, as two processes; `scripts.py FRAMEWORK FOLDER`.

Each trains a second time with exchanges that do nothing: the workers must then drift apart.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from matcha import families, plan
from matcha.distributed import Gossip
from matcha.distributed.exchange.exchange import Exchange

PLAN = plan(families.path(2), 1.0, "vanilla")
SPARSE = plan(families.path(2), 0.25, "periodic")  # one round of six, the fourth
STEPS = 6


class Data(torch.utils.data.Dataset[Any]):
    """Sums of four numbers; each process gets its half."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(4, generator=generator)
        return {"x": x, "labels": x.sum() + 0.1 * index}


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (model(batch["x"])[:, 0] - batch["labels"]).square().mean()


def flat(model: nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def drift(ones: nn.Module) -> float:
    """How far the two processes' models are apart."""
    own = torch.tensor(flat(ones))
    both = [torch.empty_like(own) for _ in range(2)]
    torch.distributed.all_gather(both, own)
    return float((both[0] - both[1]).norm())


@contextmanager
def without_exchanges() -> Iterator[None]:
    run = Exchange.run
    Exchange.run = lambda *_: 1  # type: ignore[method-assign]
    try:
        yield
    finally:
        Exchange.run = run  # type: ignore[method-assign]


# -- Accelerate ------------------------------------------------------------------------------------


def run_accelerate(folder: Path) -> dict[str, Any]:
    from accelerate import Accelerator

    from matcha.distributed.integrations import without_ddp

    accelerator = without_ddp(Accelerator(cpu=True))

    def train() -> tuple[nn.Module, Gossip]:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        loader = torch.utils.data.DataLoader(Data(), batch_size=4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        gossip = Gossip(model, optimizer, PLAN, timeout=150)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
        return model, gossip

    model, gossip = train()
    apart = drift(model)
    with gossip.averaged():  # Accelerate saves on the first process only: let it save the average
        saved = flat(model)
        accelerator.save_state(folder / "state")
        accelerator.save_model(model, folder / "model")
    accelerator.save_model(make(), folder / "plain")
    accelerator.wait_for_everyone()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    accelerator.load_state(folder / "state")
    size = (folder / "model" / "model.safetensors").stat().st_size
    found = {
        "class": type(model).__name__,
        "iteration": gossip.iteration,
        "drift": apart,
        "restored": flat(model) == saved,
        "size": size / (folder / "plain" / "model.safetensors").stat().st_size,
    }
    gossip.detach()
    with without_exchanges():
        found["control"] = drift(train()[0])
    return found


# -- Transformers ----------------------------------------------------------------------------------


def run_transformers(folder: Path) -> dict[str, Any]:
    from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

    from matcha.distributed.integrations.transformers import GossipTrainerMixin

    class Config(PretrainedConfig):
        model_type = "sums"

    class Model(PreTrainedModel):
        config_class = Config

        def __init__(self, config: Config) -> None:
            super().__init__(config)
            self.body = make()
            self.post_init()

        def forward(self, x: Any, labels: Any = None) -> dict[str, Any]:
            out = self.body(x)[:, 0]
            return {"loss": (out - labels).square().mean(), "logits": out}

    class MyTrainer(GossipTrainerMixin, Trainer):
        pass

    def train(
        saves: str,
        out: str = "out",
        resume: str | None = None,
        plan: Any = PLAN,
        **choices: Any,
    ) -> tuple[Model, MyTrainer]:
        arguments = TrainingArguments(
            output_dir=str(folder / out),
            per_device_train_batch_size=4,
            num_train_epochs=1,
            learning_rate=0.05,
            max_grad_norm=1.0,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
            eval_strategy=saves,
            save_strategy=saves,
            remove_unused_columns=False,
            **choices,
        )
        model = Model(Config())
        trainer = MyTrainer(
            model=model,
            args=arguments,
            train_dataset=Data(),
            eval_dataset=Data(),
            plan=plan,
            gossip={"timeout": 150},
        )
        trainer.train(resume_from_checkpoint=resume)
        return model, trainer

    plain = folder / "plain"
    Model(Config()).save_pretrained(plain)
    model, trainer = train("epoch")
    assert trainer.gossip is not None
    with trainer.gossip.averaged():
        average = flat(model)
    trainer.save_model(str(folder / "saved"))
    torch.distributed.barrier()
    saved = Model.from_pretrained(folder / "saved")
    (checkpoint,) = (folder / "out").glob("checkpoint-*")
    size = (folder / "saved" / "model.safetensors").stat().st_size
    found = {
        "class": type(trainer.model_wrapped).__name__,
        "iteration": trainer.gossip.iteration,
        "drift": drift(model),
        "restored": flat(saved) == average == flat(Model.from_pretrained(checkpoint)),
        "size": size / (plain / "model.safetensors").stat().st_size,
    }
    # Stopped after two of six steps, when the workers have not met yet.
    whole, _ = train("steps", "whole", plan=SPARSE, save_steps=2)
    middle = str(folder / "whole" / "checkpoint-2")
    resumed, trainer = train("no", "resumed", middle, plan=SPARSE)
    assert trainer.gossip is not None
    found["resumed"] = flat(resumed) == flat(whole) and trainer.gossip.iteration == STEPS
    found["resumed_apart"] = drift(resumed)
    with without_exchanges():
        found["control"] = drift(train("no")[0])
    return found


# -- Lightning -------------------------------------------------------------------------------------


def run_lightning(folder: Path) -> dict[str, Any]:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from matcha.distributed.integrations.lightning import GossipStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body = make()
            self.seen: list[float] = []
            self.tested: list[float] = []

        def training_step(self, batch: Any, index: int) -> Any:
            return loss(self.body, batch)

        def validation_step(self, batch: Any, index: int) -> None:
            self.seen = flat(self.body)
            self.log("val_loss", loss(self.body, batch), sync_dist=True)

        def test_step(self, batch: Any, index: int) -> None:
            self.tested = flat(self.body)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    def fit(epochs: int, resume: Any = None) -> tuple[Any, Any, Any]:
        strategy = GossipStrategy(
            PLAN, gossip={"timeout": 150, "overlap": True}, process_group_backend="gloo"
        )
        module = Module()
        best = ModelCheckpoint(dirpath=folder / "best", filename="best", monitor="val_loss")
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            max_epochs=epochs,
            precision="bf16-mixed",
            gradient_clip_val=1.0,
            callbacks=[best, Last(strategy)],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        loader = torch.utils.data.DataLoader(Data(), batch_size=4)
        trainer.fit(module, loader, loader, ckpt_path=resume)
        return module, strategy, trainer

    class Last(lightning.Callback):
        def __init__(self, strategy: Any) -> None:
            self.strategy = strategy

        def on_train_end(self, trainer: Any, module: Any) -> None:
            module.drift = drift(module)
            module.iteration = self.strategy.gossip.iteration
            trainer.save_checkpoint(folder / f"last-{trainer.current_epoch}.ckpt")
            module.own = flat(module)
            with self.strategy.gossip.averaged() as average:
                module.average = flat(average)

    once, _, trainer = fit(2)
    trainer.test(once, torch.utils.data.DataLoader(Data(), batch_size=4), verbose=False)
    fit(1)
    resumed, _, _ = fit(2, folder / "last-1.ckpt")
    best = torch.load(folder / "best" / "best.ckpt", weights_only=False)["state_dict"]
    saved = torch.cat([value.flatten() for value in best.values()]).tolist()
    plain = folder / f"plain-{trainer.global_rank}.pt"
    torch.save(Module().state_dict(), plain)
    torch.save(best, folder / f"best-{trainer.global_rank}.pt")
    with without_exchanges():
        control = fit(1)[0].drift
    return {
        "control": control,
        "class": type(trainer.strategy.model or once).__name__,
        "iteration": once.iteration,
        "drift": once.drift,
        "restored": saved == once.seen and resumed.own == once.own,
        "tested": once.tested == once.average != once.own,
        "size": (folder / f"best-{trainer.global_rank}.pt").stat().st_size / plain.stat().st_size,
    }


def main(framework: str, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = {
        "accelerate": run_accelerate,
        "transformers": run_transformers,
        "lightning": run_lightning,
    }[framework]
    found = run(Path(folder))
    rank = (
        torch.distributed.get_rank()
        if torch.distributed.is_initialized()
        else int(os.environ.get("LOCAL_RANK", "0"))
    )
    (Path(folder) / f"found-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
