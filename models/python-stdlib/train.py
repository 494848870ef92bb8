"""Trains the model on the token arrays that ``prepare.py`` wrote.

    python train.py --data build/model-data --run build/model-run --out build/model-out --epochs 30 --minutes 9

The run folder holds the checkpoint; the same command continues from it, step for step as if it had never stopped. The
out folder gets the best weights in bf16, in files of at most 16 MiB, whenever they improve.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from export import write_weights
from model import Model, Shape
from torch import Tensor
from torch.nn import functional as F

PEAK_FLOPS = 790e12  # dense bf16 of an H200 as measured on large matrices; only for the share in the log
MEASURED_STEPS = range(15, 45)  # whose time decides how many steps fit into --minutes; compilation is over by then


@dataclass
class Progress:
    """All of a run's state that is not a tensor."""

    step: int = 0
    total_steps: int | None = None  # None until the speed has been measured
    seconds: float = 0.0
    best_valid: float = math.inf
    best_step: int = -1
    settings: dict[str, Any] = field(default_factory=dict)


class Trainer:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        data = json.loads((args.data / "data.json").read_text())
        self.shape = Shape(vocabulary=data["vocabulary"], **_shape_arguments(args))
        self.bytes = {name: data[name]["bytes"] for name in ("train", "valid", "heldout")}
        self.tokens = {name: self._read(args.data / f"{name}.bin") for name in self.bytes}
        # The last windows of an epoch that do not fill a batch are left to the next epoch, which cuts elsewhere.
        self.epoch_steps = (len(self.tokens["train"]) - 2 * self.shape.context) // self.shape.context // args.batch
        if self.epoch_steps < 1:
            raise SystemExit(f"--batch {args.batch} windows of {self.shape.context} tokens are more than the data")
        self.order: tuple[int, np.ndarray] = (-1, np.empty(0))

        _seed(args.seed)
        self.model = Model(self.shape, args.dropout).to(self.device)
        self.average = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(
            _decay_groups(self.model, args.weight_decay),
            lr=args.lr,
            betas=(0.9, 0.95),
            fused=self.device.type == "cuda",
        )
        self.progress = Progress(settings=_settings(args, self.shape))
        self.stop_requested = False
        self.rounded = False
        self.compiled = False

        args.run.mkdir(parents=True, exist_ok=True)
        args.out.mkdir(parents=True, exist_ok=True)
        self.checkpoint = args.run / "checkpoint.pt"
        self.log_path = args.out / "log.jsonl"
        if self.checkpoint.exists():
            self._resume()
        else:
            (args.run / "log.jsonl").write_text("")
        self._publish_log()

    # Data

    def _read(self, path: Path) -> Tensor:
        return torch.from_numpy(np.fromfile(path, dtype=np.uint16).astype(np.int32)).to(self.device)

    def _batch(self, step: int) -> Tensor:
        """The windows of one step, [batch, context + 1]; only the seed and the step decide which."""
        epoch, position = divmod(step, self.epoch_steps)
        context, batch = self.shape.context, self.args.batch
        if self.order[0] != epoch:
            rng = np.random.default_rng((self.args.seed, epoch))
            offset = int(rng.integers(context))  # other borders every epoch
            windows = (len(self.tokens["train"]) - 1 - offset) // context
            self.order = (epoch, offset + context * rng.permutation(windows))
        starts = torch.from_numpy(self.order[1][position * batch : (position + 1) * batch])
        index = starts[:, None] + torch.arange(context + 1)
        return self.tokens["train"][index.to(self.device, non_blocking=True)].long()

    # Training

    def train(self) -> None:
        args, progress, shape = self.args, self.progress, self.shape
        started = last_checkpoint = last_log = time.monotonic()
        before = progress.seconds
        self._log(
            event="start",
            step=progress.step,
            parameters=shape.parameters(),
            active_parameters=shape.parameters(active=True),
            training_flops_per_token=shape.training_flops(),
            shipped_bytes_w4_g128=shape.shipped_bytes(),
            tokens_per_epoch=self.epoch_steps * args.batch * shape.context,
            device=torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
            torch=torch.__version__,
            settings=progress.settings,
        )
        if self.device.type == "cuda" and not args.no_compile:
            for layer in self.model.layers:
                layer.compile()  # one layer is compiled, the others reuse it: a fraction of the time of the whole model
            self.compiled = True
        if progress.total_steps is None and args.minutes is None:
            progress.total_steps = round(args.epochs * self.epoch_steps)

        measured_from = 0.0
        logged_step = progress.step
        self.model.train()
        while progress.total_steps is None or progress.step < progress.total_steps:
            if progress.total_steps is None and progress.step == MEASURED_STEPS.start:
                measured_from = self._synchronised_time()
            metrics = self._step(progress.step)
            progress.step += 1
            if progress.total_steps is None and progress.step == MEASURED_STEPS.stop:
                seconds = (self._synchronised_time() - measured_from) / len(MEASURED_STEPS)
                self._fix_total_steps(seconds, time.monotonic() - started)

            if progress.step % args.log_every == 0:
                now = self._synchronised_time()
                rate = (progress.step - logged_step) * args.batch * shape.context / (now - last_log)
                self._log(
                    event="train",
                    step=progress.step,
                    epoch=round(progress.step / self.epoch_steps, 3),
                    lr=self._learning_rate(progress.step - 1),
                    tokens_per_second=round(rate),
                    flops_share=round(rate * shape.training_flops() / PEAK_FLOPS, 3),
                    seconds=round(before + now - started, 1),
                    **{name: round(float(value), 5) for name, value in metrics.items()},
                )
                if not math.isfinite(float(metrics["loss"])):
                    raise SystemExit("the loss is not finite: lower --lr")
                last_log, logged_step = now, progress.step
            progress.seconds = before + time.monotonic() - started
            if progress.step % args.eval_every == 0 or progress.step == progress.total_steps:
                self._evaluate_and_keep()
                last_log, logged_step = self._synchronised_time(), progress.step
            now = time.monotonic()
            limit = args.stop_after_minutes is not None and now - started > 60 * args.stop_after_minutes
            if now - last_checkpoint > args.checkpoint_seconds or limit or self.stop_requested:
                self._save()
                last_checkpoint = last_log = time.monotonic()
                logged_step = progress.step
            if limit or self.stop_requested:
                print(f"stopped at step {progress.step}; the same command continues", flush=True)
                return
        self._save()
        self._finish()

    def _step(self, step: int) -> dict[str, Tensor]:
        args = self.args
        _seed(args.seed * 1_000_003 + step + 1)  # dropout depends on the step alone, so a resumed run repeats it
        self._round_weights_when_due(step)
        batch = self._batch(step)
        try:
            metrics = self._backward(batch)
        except Exception as error:  # compilers fail in many ways; the uncompiled model is slower but the same
            if not self.compiled or isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            print(f"torch.compile failed ({type(error).__name__}: {str(error)[:500]}); going on without", flush=True)
            torch.compiler.set_stance("force_eager")
            self.compiled = False
            self.optimizer.zero_grad(set_to_none=True)
            metrics = self._backward(batch)
        metrics["grad_norm"] = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        decay = min(args.average, (step + 1) / (step + 10))
        torch._foreach_lerp_(self.average, [p.detach() for p in self.model.parameters()], 1 - decay)
        return metrics

    def _backward(self, batch: Tensor) -> dict[str, Tensor]:
        with self._precision():
            hidden, routings = self.model(batch[:, :-1])
            logits = self.model.logits(hidden)
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        balance = torch.stack([routing.balance for routing in routings]).mean()
        z = torch.stack([routing.z for routing in routings]).mean()
        layers = self.shape.layers  # each layer's losses count in full: the logged means would shrink with the depth
        (loss + layers * (self.args.balance * balance + self.args.z * z)).backward()
        loads = torch.stack([routing.load for routing in routings])
        return {
            "loss": loss.detach(),
            "balance": balance.detach(),
            "z": z.detach(),
            "smallest_load": loads.min() * self.shape.experts,  # 1 is an equal share
            "largest_load": loads.max() * self.shape.experts,
        }

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        if self.device.type == "cuda":
            return torch.autocast("cuda", dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def _learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a fiftieth."""
        peak: float = self.args.lr
        if step < self.args.warmup:
            return float(peak * (step + 1) / self.args.warmup)
        total = self.progress.total_steps or step + 1
        done = min(1.0, (step - self.args.warmup) / max(1, total - self.args.warmup))
        return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))

    def _round_weights_when_due(self, step: int) -> None:
        total = self.progress.total_steps
        due = total is not None and step >= self.args.round_from * total
        if due != self.rounded:
            self.model.set_rounded(due)
            self.rounded = due

    def _fix_total_steps(self, seconds_per_step: float, spent: float) -> None:
        """Decides once how long the schedule is; written to the checkpoint, so that it never changes again."""
        steps = self.args.epochs * self.epoch_steps
        if self.args.minutes is not None:
            # 5 % for evaluations and checkpoints
            fits = MEASURED_STEPS.stop + (60 * self.args.minutes - spent) * 0.95 / seconds_per_step
            steps = min(steps, fits)
        self.progress.total_steps = max(round(steps), MEASURED_STEPS.stop + 1)
        self._log(
            event="schedule",
            step=self.progress.step,
            seconds_per_step=round(seconds_per_step, 5),
            total_steps=self.progress.total_steps,
            epochs=round(self.progress.total_steps / self.epoch_steps, 2),
            compiled=self.compiled,
        )

    def _synchronised_time(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.monotonic()

    # Evaluation

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[None]:
        """The model with its averaged weights, uncompiled: a compiled evaluation would take longer to compile."""
        parameters = [parameter.data for parameter in self.model.parameters()]
        trained = [parameter.clone() for parameter in parameters]
        torch._foreach_copy_(parameters, self.average)
        self.model.eval()
        self.model.set_rounded(False)
        try:
            with torch.no_grad(), torch.compiler.set_stance("force_eager"), self._precision():
                yield
        finally:
            torch._foreach_copy_(parameters, trained)
            self.model.train()
            self.model.set_rounded(self.rounded)

    def _evaluate(self, part: str, limit: int | None = None) -> tuple[float, list[list[float]]]:
        """Bits per byte of a part, and the load of every expert of every layer.

        Windows overlap by half: every token is predicted once, from at least half a context where there is so much.
        """
        context = self.shape.context
        tokens = self.tokens[part][:limit].long()
        size = self.bytes[part] * len(tokens) / len(self.tokens[part])
        stride = context // 2
        starts = list(range(0, max(1, len(tokens) - 1 - stride), stride))
        nats = torch.zeros((), dtype=torch.float64, device=self.device)
        loads = torch.zeros(self.shape.layers, self.shape.experts, device=self.device)
        with self._averaged():
            for first in range(0, len(starts), self.args.eval_batch):
                rows = starts[first : first + self.args.eval_batch]
                ids = torch.zeros(len(rows), context + 1, dtype=torch.long, device=self.device)
                counted = torch.zeros(len(rows), context, dtype=torch.bool, device=self.device)
                for row, start in enumerate(rows):
                    window = tokens[start : start + context + 1]
                    ids[row, : len(window)] = window
                    counted[row, 0 if start == 0 else stride : len(window) - 1] = True
                hidden, routings = self.model(ids[:, :-1])
                losses = F.cross_entropy(
                    self.model.logits(hidden).float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
                )
                nats += losses[counted.flatten()].double().sum()
                loads += torch.stack([routing.load for routing in routings]) * len(rows) / len(starts)
        return float(nats) / math.log(2) / size, [[round(x, 5) for x in layer] for layer in loads.tolist()]

    def _evaluate_and_keep(self) -> None:
        progress = self.progress
        valid, loads = self._evaluate("valid")
        train, _ = self._evaluate("train", len(self.tokens["valid"]))
        self._log(
            event="eval",
            step=progress.step,
            epoch=round(progress.step / self.epoch_steps, 3),
            seconds=round(progress.seconds, 1),
            valid_bits_per_byte=round(valid, 5),
            train_bits_per_byte=round(train, 5),
            loads=loads,
        )
        if valid < progress.best_valid:
            progress.best_valid, progress.best_step = valid, progress.step
            _write_atomically(self.args.run / "best.pt", self._average_state())
            if not self.args.log_only:
                write_weights(self.args.out, self.shape, self._average_state(), self.args.data)

    def _average_state(self) -> dict[str, Tensor]:
        names = [name for name, _ in self.model.named_parameters()]
        return {name: tensor.cpu() for name, tensor in zip(names, self.average, strict=True)}

    def _finish(self) -> None:
        best = torch.load(self.args.run / "best.pt", map_location=self.device, weights_only=True)
        # As shipped: the figures are those of the bf16 weights.
        self.average = [best[name].bfloat16().float() for name, _ in self.model.named_parameters()]
        valid, _ = self._evaluate("valid")
        heldout, loads = self._evaluate("heldout")
        self._log(
            event="best",
            step=self.progress.best_step,
            valid_bits_per_byte=round(valid, 5),
            heldout_bits_per_byte=round(heldout, 5),
            loads=loads,
        )
        if self.args.log_only:
            return
        try:
            from plot import plot

            plot(self.log_path, self.args.out / "curves.png")
        except ImportError:
            print("no matplotlib here: run plot.py on log.jsonl elsewhere", flush=True)

    # What is kept on disk

    def _save(self) -> None:
        _write_atomically(
            self.checkpoint,
            {
                "model": self.model.state_dict(),
                "average": self.average,
                "optimizer": self.optimizer.state_dict(),
                "progress": asdict(self.progress),
            },
        )

    def _resume(self) -> None:
        saved = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        progress = Progress(**saved["progress"])
        different = {
            name: (value, self.progress.settings[name])
            for name, value in progress.settings.items()
            if self.progress.settings[name] != value
        }
        if different:
            raise SystemExit(f"{self.checkpoint} was made with other settings (then, now): {different}")
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.average = saved["average"]
        self.progress = progress
        # What was logged after the checkpoint will be computed again.
        path = self.args.run / "log.jsonl"
        lines = [line for line in path.read_text().splitlines() if json.loads(line)["step"] <= progress.step]
        path.write_text("".join(f"{line}\n" for line in lines))
        best = self.args.run / "best.pt"
        if best.exists() and not self.args.log_only:  # the out folder may be a new one
            write_weights(self.args.out, self.shape, torch.load(best, weights_only=True), self.args.data)

    def _publish_log(self) -> None:
        self.log_path.write_text((self.args.run / "log.jsonl").read_text())

    def _log(self, **entry: Any) -> None:
        line = json.dumps(entry)
        for path in (self.args.run / "log.jsonl", self.log_path):
            with path.open("a") as file:
                file.write(line + "\n")
        short = {key: value for key, value in entry.items() if key != "loads"}
        print(json.dumps(short), flush=True)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)


def _decay_groups(model: Model, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay as told; the embedding little, or rare tokens fade; the router and the norms not at all."""
    matrices, embedding, rest = [], [], []
    for name, parameter in model.named_parameters():
        if name == "embed_tokens":
            embedding.append(parameter)
        elif parameter.ndim == 2 and not name.endswith("router"):
            matrices.append(parameter)
        else:
            rest.append(parameter)
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": embedding, "weight_decay": min(weight_decay, 0.1)},
        {"params": rest, "weight_decay": 0.0},
    ]


def _write_atomically(path: Path, content: Any) -> None:
    """A run killed while it writes leaves the old file."""
    partial = path.with_suffix(".partial")
    torch.save(content, partial)
    partial.replace(path)


_SHAPE_FIELDS = [item for item in fields(Shape) if item.name != "vocabulary"]
# What may differ when a run continues: these change neither the weights nor the schedule.
_FREE = {"data", "run", "out", "device", "stop_after_minutes", "checkpoint_seconds", "log_every", "no_compile"}
_FREE |= {"eval_batch", "log_only"}


def _shape_arguments(args: argparse.Namespace) -> dict[str, Any]:
    return {item.name: getattr(args, item.name) for item in _SHAPE_FIELDS}


def _settings(args: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    return {name: value for name, value in vars(args).items() if name not in _FREE} | asdict(shape)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("build/model-data"))
    parser.add_argument("--run", type=Path, default=Path("build/model-run"), help="checkpoint, for resuming")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "build/model-out")))
    parser.add_argument("--epochs", type=float, default=30.0)
    parser.add_argument("--minutes", type=float, help="shorten the schedule so that the whole run takes no longer")
    parser.add_argument("--stop-after-minutes", type=float, help="end this process with a checkpoint after so long")
    parser.add_argument("--batch", type=int, default=32, help="windows per step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=300, help="steps")
    parser.add_argument("--weight-decay", type=float, default=0.5)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--average", type=float, default=0.998, help="decay of the running mean of the weights")
    parser.add_argument("--balance", type=float, default=0.01, help="weight of a layer's load-balancing loss")
    parser.add_argument("--z", type=float, default=2e-4, help="weight of a layer's router z-loss")
    parser.add_argument(
        "--round-from",
        type=float,
        default=1.0,
        help="share of the steps after which the forward pass sees weights rounded to 4 bits (1: never)",
    )
    parser.add_argument("--eval-every", type=int, default=250, help="steps")
    parser.add_argument("--eval-batch", type=int, default=64, help="windows")
    parser.add_argument("--log-every", type=int, default=50, help="steps")
    parser.add_argument("--log-only", action="store_true", help="no weights in the out folder: for trials")
    parser.add_argument("--checkpoint-seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device")
    parser.add_argument("--no-compile", action="store_true")
    for item in _SHAPE_FIELDS:
        parser.add_argument(f"--{item.name.replace('_', '-')}", type=type(item.default), default=item.default)
    args = parser.parse_args()
    if args.minutes is not None and args.warmup < MEASURED_STEPS.stop:
        parser.error(f"--warmup must be {MEASURED_STEPS.stop} or more with --minutes: the speed is measured in it")
    return args


def main() -> None:
    torch.set_float32_matmul_precision("high")
    trainer = Trainer(_arguments())

    def request_stop(*_: object) -> None:
        trainer.stop_requested = True  # the loop writes a checkpoint after the current step

    signal.signal(signal.SIGTERM, request_stop)
    signal.signal(signal.SIGINT, request_stop)
    trainer.train()


if __name__ == "__main__":
    main()
