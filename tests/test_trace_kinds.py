"""Kinds of event: the table's rows, and the user's own."""

from __future__ import annotations

import pytest

from taciturn.errors import InputError
from taciturn.trace.kinds import KIND_WORDS, Kind, classify, parse_kind


@pytest.mark.parametrize(
    ("category", "name", "kind"),
    [
        ("kernel", "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, ...)", "COMMUNICATION"),
        ("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)", "COMMUNICATION"),
        ("kernel", "nccldevkernel_sendrecv(...)", "COMMUNICATION"),
        ("kernel", "ncclDevKernel_Generic(...)", "COMMUNICATION"),
        ("Kernel", "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t", "COMMUNICATION"),
        ("kernel", "vllm::cross_device_reduce_1stage<...>", "COMMUNICATION"),
        ("kernel", "my_fast_allreduce(float*)", "UNKNOWN"),
        ("kernel", "at::native::reduce_kernel<512, 1, ...>", "COMPUTE"),
        ("kernel", "volta_sgemm_128x64_nn", "COMPUTE"),
        ("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", "COPY"),
        ("Memset", "Memset (Device)", "COPY"),
        ("user_annotation", "gloo:all_reduce", "COMMUNICATION"),
        ("user_annotation", "nccl:all_reduce", "CALL"),
        ("gpu_user_annotation", "nccl:all_reduce", "GPU_ANNOTATION"),
        ("user_annotation", "ProfilerStep#3", "ANNOTATION"),
        ("user_annotation", "taciturn::encode", "CODEC"),
        ("cpu_op", "c10d::allreduce_", "CALL"),
        ("cpu_op", "record_param_comms", "CALL"),
        ("cpu_op", "aten::mm", "CPU"),
        ("Operator", "aten::mm", "CPU"),
        ("cuda_runtime", "cudaLaunchKernelExC", "LAUNCH"),
        ("cuda_driver", "cuLaunchKernelEx", "LAUNCH"),
        ("cuda_runtime", "hipExtModuleLaunchKernel", "LAUNCH"),
        ("cuda_runtime", "cudaMemcpyAsync", "LAUNCH"),
        ("cuda_runtime", "cudaMemcpy", "SYNC"),
        ("Runtime", "cudaDeviceSynchronize", "SYNC"),
        ("cuda_runtime", "hipStreamSynchronize", "SYNC"),
        ("cuda_runtime", "cudaStreamWaitEvent", "STREAM_WAIT"),
        ("cuda_runtime", "cudaEventRecordWithFlags", "EVENT_RECORD"),
        ("cuda_runtime", "cudaFuncSetAttribute", "RUNTIME"),
        ("cuda_sync", "Stream Sync", "DEVICE_SYNC"),
        ("python_function", "train.py(3): step", "PYTHON"),
        ("Trace", "PyTorch Profiler (0)", "OVERHEAD"),
        ("never_heard_of", "something", "UNKNOWN"),
        ("", "", "UNKNOWN"),
    ],
)
def test_table(category: str, name: str, kind: str) -> None:
    """What names and categories of several years and makers stand for."""
    assert classify(category, name) == Kind[kind]


def test_the_user_comes_first() -> None:
    """A pattern with * and ? matches the whole name, in any case, before the table."""
    rules = [parse_kind("*Fast_AllReduce*=comm"), parse_kind("gemm?=ignore")]
    assert classify("kernel", "my_fast_allreduce(float*)", rules) == Kind.COMMUNICATION
    assert classify("kernel", "gemm1", rules) == Kind.OVERHEAD
    assert classify("kernel", "gemm12", rules) == Kind.COMPUTE


@pytest.mark.parametrize("text", ["nothing", "=comm", "a=", "a=b", ""])
def test_what_is_no_rule_is_refused(text: str) -> None:
    """The message lists the kinds."""
    with pytest.raises(InputError, match="compute") as caught:
        parse_kind(text)
    assert all(word in str(caught.value) for word in KIND_WORDS)
