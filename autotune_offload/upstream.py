"""Everything that is relied on of DeepSpeed's source. A new release means this one file.

Each constant names the file or the pull request that it was read from, and the releases that it holds for. What a
live optimizer is asked for by these names is in `engine.stage3`.
"""

from __future__ import annotations

from typing import Literal

from packaging.version import InvalidVersion, Version

from autotune_offload.errors import ConfigError
from autotune_offload.records import Memory, Record

Section = Literal["offload_optimizer", "offload_param"]

# -- releases -------------------------------------------------------------------------------------

OLDEST = "0.14.5"
"""The oldest DeepSpeed whose parser these keys were tried on, and whose ZeRO-3 source was read."""

NEWEST = "0.19.8"
"""The newest one."""

NEEDS_NUMACTL_BELOW = Version("0.16")
"""Up to 0.15.4 DeepSpeed's CPU accelerator calls numactl unless LOCAL_SIZE is set (read and run: 0.14.5 to
0.15.4 fail, 0.16.2 does not)."""

NATIVE_PINS_SINCE = Version("0.19.6")
"""The first DeepSpeed that reads DS_PIN_MEMORY_BACKEND."""

SUPER_OFFLOAD_WAITS_SINCE = Version("0.18.9")
"""The first DeepSpeed whose SuperOffload steps on the CPU during the backward pass only without gradient clipping
(runtime/superoffload/superoffload_stage3.py: partition_grads); 0.18.8 stepped ahead and undid what clipping changed."""

PINS_BY_DEFAULT_SINCE = "0.19.5"
"""The first DeepSpeed that takes an absent ``pin_memory`` as true (PR 8207)."""


MASTERS_PINNED_AS_TOLD_SINCE = Version("0.18.3")
"""Before, stages 1 and 2 pin their fp32 weights whatever ``pin_memory`` says (`stage_1_and_2.py`; read in 0.16.9,
0.18.0 and 0.19.8, the release from PR 7689)."""

LOSES_GRADIENTS_SINCE, SUMS_RIGHT_SINCE = Version("0.15.2"), Version("0.19.0")
"""Between them stage 2 with its optimizer on the host stores the sum of accumulated gradients after the first
micro-step only, so that of three or more the ones in the middle are lost: only the first and the last count
(`stage_1_and_2.py`, async_accumulate_grad_in_cpu_via_gpu; read in 0.15.1, 0.15.2, 0.18.9 and 0.19.0, run in 0.18.9 and
0.19.8; PR 6550 and PR 7967). Stage 1 reduces at the boundary alone and is not hit."""

HALF_BUFFER_SINCE = Version("0.17.0")
"""The first DeepSpeed whose stages 1 and 2 keep a 16-bit copy of the weights on the host (`stage_1_and_2.py`,
param_buffer_of_bit16_for_cpu_offload_groups; PR 7309; 0.16.9 has none, 0.18.0 has it)."""


def parse_version(text: str) -> Version:
    """`text` as a version.

    Raises:
        ConfigError: if it is none.
    """
    try:
        return Version(text)
    except InvalidVersion:
        raise ConfigError(
            f'DeepSpeed version "{text}" is not a version; expected one such as 0.19.8'
        ) from None


def pins_by_default(version: str) -> bool:
    """What DeepSpeed `version` takes an absent ``pin_memory`` as. Raises ConfigError if it is no version."""
    return parse_version(version).release >= Version(PINS_BY_DEFAULT_SINCE).release


def loses_gradients(version: str, stage: int, accumulation_steps: int) -> bool:
    """Whether DeepSpeed `version` trains on with less than the gradients, its optimizer being on the host.

    Raises:
        ConfigError: if `version` is no version.
    """
    release = parse_version(version).release
    affected = LOSES_GRADIENTS_SINCE.release <= release < SUMS_RIGHT_SINCE.release
    return affected and stage == 2 and accumulation_steps >= 3


# -- its configuration ----------------------------------------------------------------------------

ZERO = "zero_optimization"

SECTION_STAGES: dict[Section, frozenset[int]] = {
    "offload_optimizer": frozenset({1, 2, 3}),
    "offload_param": frozenset({3}),
}
"""The ZeRO stages in which each offload section acts."""

LEGACY: dict[str, Section] = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
"""Deprecated switches and the sections that replace them."""

LEGACY_PIN = "cpu_offload_use_pin_memory"
"""Deprecated; DeepSpeed reads it and does nothing with it."""

KNOWN = frozenset(
    """
    stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce
    allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights
    elastic_checkpoint offload_param offload_optimizer zenflow sub_group_size cpu_offload_param
    cpu_offload_use_pin_memory cpu_offload prefetch_bucket_size param_persistence_threshold
    model_persistence_threshold max_live_parameters max_reuse_distance gather_16bit_weights_on_model_save
    module_granularity_threshold use_all_reduce_for_fetch_params allgather_sequential
    stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold
    stage3_max_live_parameters stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save
    stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential
    stage3_gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1 round_robin_gradients
    parameter_alignment zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights
    zero_quantized_gradients memory_efficient_linear pipeline_loading_checkpoint override_module_apply
    log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module
    mics_shard_size mics_hierarchical_params_gather zeropp_loco_param
    """.split()
)
"""What some DeepSpeed from 0.14.5 to 0.19.8 takes in ``zero_optimization`` (`runtime/zero/config.py`)."""

KNOWN_IN_SECTIONS = {
    "offload_optimizer": frozenset(
        """
        device nvme_path buffer_count pin_memory pipeline_read pipeline_write fast_init ratio super_offload
        cpuadam_cores_perc
        """.split()
    ),
    "offload_param": frozenset(
        ("device", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory")
    ),
}
"""The same for the two offload sections (`runtime/zero/offload_config.py`)."""

REDUCE_BUCKET_ELEMENTS = 500_000_000
PREFETCH_BUCKET_ELEMENTS = 50_000_000
PERSISTENCE_ELEMENTS = 100_000
SUB_GROUP_ELEMENTS = 1_000_000_000
MAX_IN_CPU_ELEMENTS = 1_000_000_000
"""The ZeRO-3 sizes where the configuration names none (`runtime/zero/config.py`, the same in all of them)."""

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

NUMBERS = (
    "gradient_clipping",
    "gradient_predivide_factor",
    "steps_per_print",
)
"""Top-level keys whose value DeepSpeed computes with as it stands (`runtime/config.py`, `runtime/engine.py`)."""

SWITCHES = (
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "prescale_gradients",
    "sparse_gradients",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "disable_allgather",
    "disable_python_gc",
    "dataloader_drop_last",
)
"""Top-level keys that it asks for their truth as they stand, where "false" is true (`runtime/config.py`)."""

TOP_LEVEL = frozenset(
    f"""
    {ZERO} {" ".join(BATCH_KEYS)} {" ".join(NUMBERS)} {" ".join(SWITCHES)}
    optimizer scheduler fp16 bf16 bfloat16 amp data_types zero_quantized_weights communication_data_type
    activation_checkpointing aio flops_profiler autotuning elasticity comms_logger monitor_config tensorboard wandb
    csv_monitor compression_training data_efficiency curriculum_learning checkpoint compile hybrid_engine
    tensor_parallel pipeline zenflow eigenvalue progressive_layer_drop sparse_attention nebula
    """.split()
)
"""Top-level keys by which a file is known as a ds_config."""

PARAM_BUFFER_COUNT, PARAM_BUFFER_ELEMENTS, MAX_IN_CPU_ELEMENTS = 5, 100_000_000, 1_000_000_000
OPTIMIZER_BUFFER_COUNT = 4
"""What the sections take for NVMe where they name nothing (`runtime/zero/offload_config.py`, the same in all)."""

AIO = "aio"

AIO_THREADS_RENAMED_SINCE = Version("0.16.4")
"""The first DeepSpeed that reads ``aio.intra_op_parallelism`` and not ``aio.thread_count`` (0.15.4 reads the one,
0.16.9 the other; renamed on 2025-02-19)."""

SWAPPED_FROM_BYTES = 1 << 20
"""Smaller tensors are never swapped, whatever ``aio.block_size`` is; below a larger block nothing is either
(`runtime/swap_tensor/optimizer_utils.py`: min_aio_bytes)."""

SWAP_BUFFERS = (4, 8, 12)
"""Buffers that the optimizer's swapper holds by how many pipeline flags are set: weights, both moments and gradients
of each sub-group that is resident (`pipelined_optimizer_swapper.py`)."""

# -- how its ZeRO-3 optimizer moves gradients -----------------------------------------------------

STAGE3 = "DeepSpeedZeroOptimizer_Stage3"
LOW_PRECISION = f"_{STAGE3}__param_id_to_grad_partition"
"""DeepSpeed's private name of the low-precision accumulation buffer's views, by ds_id."""

FLAT_LOW_PRECISION = "grad_partitions_flat_buffer"
"""The accumulation buffer in one piece, which `has_overflow` alone reads."""

PARTITION, EPILOGUE, DESTROY = "partition_grads", "independent_gradient_partition_epilogue", "destroy"
NORMS = "complete_grad_norm_calculation_for_cpu_offload"
"""Adds up the norms of one sub-group's partitions, and rounds the sum to fp32."""

STEP_BEGINS = "_pre_step"
"""What `step` calls first."""

AWAY = "offload_states"
"""Takes the accumulation buffer's views away; since 0.15.4."""

FINALIZE = "finalize_gradient_accumulation_boundary"
"""Takes what unmanaged accumulation has summed to fp32, when the engine steps; since 0.19.5."""

OVERFLOW = "has_overflow"

READERS = (
    OVERFLOW,
    "get_fp32_grad_for_param",
    "get_local_fp32_grad_for_param",
    "get_fp32_grad_partitions",
    "set_fp32_grad_for_param",
    "set_local_grad_for_param",
    "update_fp32_grad_for_param_vectorized",
    FINALIZE,
)
"""What else reads or writes the fp32 gradients or the accumulation buffer, whenever a user or DeepSpeed's engine
calls it (`runtime/zero/stage3.py`); no release has more of them, and the oldest have fewer."""

NEEDED = (
    PARTITION,
    EPILOGUE,
    "grad_position",
    "norm_for_param_grads",
    NORMS,
    STEP_BEGINS,
    "fp32_partitioned_groups_flat",
    "gradient_accumulation_dtype",
    "is_gradient_accumulation_boundary",
    "micro_step_id",
    LOW_PRECISION,
)


class StockSequence(Record, frozen=True, kw_only=True):
    """How one range of DeepSpeed versions moves a gradient at the accumulation boundary.

    `first` and `last` bound the versions, inclusive, as (major, minor, patch); `default_memory` is
    where those versions put the destination when `pin_memory` is not written.
    """

    name: str
    first: tuple[int, int, int]
    last: tuple[int, int, int]
    default_memory: Memory

    @property
    def versions(self) -> str:
        """The range in words."""
        low = ".".join(map(str, self.first))
        return (
            f"{low} and newer"
            if self.last == NEWEST_SEQUENCE
            else f"{low} to {'.'.join(map(str, self.last))}"
        )


NEWEST_SEQUENCE = (10_000, 0, 0)

# partition_grads in deepspeed/runtime/zero/stage3.py, read in the wheels of 17 versions
STOCK_SEQUENCES = (
    StockSequence(name="implicit_upcast", first=(0, 14, 5), last=(0, 15, 3), default_memory="pageable"),
    StockSequence(name="bounce_buffer", first=(0, 15, 4), last=(0, 16, 2), default_memory="pageable"),
    StockSequence(name="explicit_upcast", first=(0, 16, 3), last=(0, 19, 4), default_memory="pageable"),
    StockSequence(
        name="explicit_upcast_non_blocking", first=(0, 19, 5), last=NEWEST_SEQUENCE, default_memory="pinned"
    ),
)


def named_sequence(name: str) -> StockSequence:
    """One of `STOCK_SEQUENCES` by its name, as a `Baseline` has it."""
    return next(sequence for sequence in STOCK_SEQUENCES if sequence.name == name)


def stock_sequence(version: tuple[int, int, int]) -> StockSequence:
    """The sequence of a DeepSpeed version; older than any known counts as the oldest."""
    for sequence in reversed(STOCK_SEQUENCES):
        if version >= sequence.first:
            return sequence
    return STOCK_SEQUENCES[0]


# -- how its optimizer of stages 1 and 2 looks for an overflow --------------------------------------

STAGE12 = "DeepSpeedZeroOptimizer"

TRACKERS = ("update_offload_overflow_tracker", "update_overflow_tracker_for_param_grad")
"""Called for each gradient of this rank at the boundary, where the optimizer is on the host: it sets
`LOCAL_OVERFLOW`, and for that waits for the device. The first takes the gradient (read in 0.18.9 to 0.19.8), the second
the parameter (0.14.5 to 0.16.9)."""

LOCAL_OVERFLOW = "local_overflow"
"""Read by `OVERFLOW` alone, and set to False by `RESET` at the end of a step (0.14.5 to 0.19.8)."""

RESET = "reset_cpu_buffers"

# -- how its ZeRO-3 optimizer makes a step --------------------------------------------------------

UNSCALE, REASSIGN = "unscale_and_clip_grads", "_reassign_or_swap_out_partitioned_parameters"
OPTIMIZER_STEP = "_optimizer_step"
UNFLATTEN, POST_STEP = "_unflatten_partitioned_parameters", "_post_step"
"""Called for each sub-group by `step` in this order, with the inner optimizer's step between the first two, and
`_post_step` once after all of them; the first three are the same syntax tree in 0.14.5 to 0.19.8."""

NEEDED_BY_STEP = (
    UNSCALE,
    REASSIGN,
    UNFLATTEN,
    POST_STEP,
    DESTROY,
    "fp16_partitioned_groups_flat",
    "fp32_partitioned_groups_flat",
    "loss_scale",
    "clip_grad",
)

CPU_ADAM = "DeepSpeedCPUAdam"
CPU_ADAM_OPERATION = "ds_opt_adam"
"""The instance attribute that holds its compiled operation (`ops/adam/cpu_adam.py`, 0.14.5 to 0.19.8). Its one call
of a step is `adam_update(id, step, lr, beta1, beta2, eps, weight_decay, bias_correction, weights, gradients,
exp_avg, exp_avg_sq)`."""

SCHEDULER_MARKS = ("_wrapped_by_lr_sched", "_with_counter")
"""What torch's learning rate schedulers leave on an optimizer's `step` that they wrap to count its calls."""
