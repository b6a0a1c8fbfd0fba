"""The table of engine modes that tests run for real."""

from support import overrides

DEEPSPEED = "hyperparameters__overwrite_deepspeed_args__"
STEPS = 40
SHORT = overrides(
    data__dataset="digits", hyperparameters__max_length=f"{{batches: {STEPS}}}", scheduling_unit=1
) + overrides(**{f"{DEEPSPEED}scheduler__params__warmup_num_steps": 5})
# At which a difference of rounding does not grow: at 0.002 it does, 5,000-fold in 23 steps on a CPU without AVX-512.
LR = overrides(**{f"{DEEPSPEED}optimizer__params__lr": 0.0005})

# What each file in experiments/ has the engine report: ZeRO stage, dtype, and with how many processes it runs.
MODES = {
    "digits": (0, "float32", (1, 2)),
    "zero1": (1, "float32", (1, 2)),
    "zero2": (2, "float32", (1, 2)),
    "zero3": (3, "float32", (1, 2)),
    "bf16": (1, "bfloat16", (1, 2)),
    "fp16": (0, "float16", (1, 2)),
    "accumulate": (0, "float32", (1, 2)),
    "offload": (3, "float32", (1, 2)),
    "moe": (1, "float32", (1, 2)),
    "moe-residual": (0, "float32", (1, 2)),
    "pipeline": (1, "float32", (2,)),  # last, for DeepSpeed keeps its stages for the rest of the process
}
# Modes that have no file of their own, as changes to one that has.
EXPERTS_ON_TWO_RANKS = overrides(
    hyperparameters__ep_world_size=2, **{f"{DEEPSPEED}zero_optimization__stage": 2}
)


def mode_rows(processes: int) -> dict[str, list[str]]:
    """The arguments of a short run in every mode that so many processes can run."""
    rows = {
        mode: ["--config", f"experiments/{mode}.yaml", *SHORT, *LR]
        for mode, (_, _, runs_with) in MODES.items()
        if processes in runs_with
    }
    if processes == 2:
        rows = {"experts on two ranks": [*rows["moe"], *EXPERTS_ON_TWO_RANKS], **rows}
    return rows


def losses(run) -> list[float]:
    return [entry["loss"] for entry in run.metrics if entry["group"] == "training"]


NET_STEPS = 4  # of a run with another network


SMALL = {"num_layers": 2, "num_heads": 4, "hidden_dim": 64, "mlp_dim": 128}


FIXED = overrides(
    data__dataset="digits",
    hyperparameters__max_length=f"{{batches: {NET_STEPS}}}",
    scheduling_unit=1,
    **{
        f"{DEEPSPEED}train_batch_size": 32,
        f"{DEEPSPEED}scheduler": "null",
        f"{DEEPSPEED}optimizer__params__lr": 0.001,
    },
)
