"""Private names of torch that the source uses. They may change in any release of torch, so the list
is reviewed whenever the bound of torch in pyproject.toml moves."""

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ("ndctl", "orchestrator", "trainer")
BOUND = "torch>=2.13,<2.14"
PRIVATE = re.compile(r"_[A-Za-z]\w*")
IN_TEXT = re.compile(r"(torch\.[\w.]+\.)?_[A-Za-z]\w*")
"""A text that may name an attribute, as in getattr."""

OF_TORCH = {
    "ndctl/rank/agreement.py": {"_get_default_store"},
    "orchestrator/agent/processes/exec_in_fork.py": {"_is_in_bad_fork"},
    "trainer/checkpoint/read.py": {
        "torch.distributed.checkpoint.state_dict_loader._load_state_dict"
    },
    "trainer/data/documents.py": {"torch.utils._pytree"},
    "trainer/gradients.py": {"_foreach_mul_", "_foreach_norm"},
    "trainer/measure/oom_snapshot.py": {"_snapshot"},
    "trainer/measure/profiling.py": {"_dump_snapshot", "_record_memory_history"},
    "trainer/model/chunked_loss.py": {"_assert_async"},
    "trainer/model/quantize.py": {"_local_tensor"},
    "trainer/model/regions.py": {
        "torch.distributed.tensor._utils.compute_local_shape_and_global_offset"
    },
    "trainer/model/sequence.py": {
        "_AutoDispatchBelowAutograd",
        "_C",
        "_c10d_functional",
        "_cdata",
        "_local_tensor",
        "_ndctl_regather",
        "torch.distributed.tensor._dtensor_spec.DTensorSpec",
    },
    "trainer/parallel/tensor.py": {"_c10d_functional"},
    "trainer/optimizer.py": {"_foreach_copy_"},
    "trainer/parallel/activation.py": {
        "_c10d_functional",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_mm",
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper",
    },
    "trainer/parallel/compile.py": {
        "_checkpoint_wrapped_module",
        "torch._dynamo.callback.callback_handler",
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper",
    },
    "trainer/parallel/context/gather.py": {
        "torch.distributed._functional_collectives.all_gather_single",
        "torch.distributed._functional_collectives.reduce_scatter_single",
        "torch.distributed._functional_collectives.wait_tensor",
    },
    "trainer/parallel/context/kernels.py": {
        "_flash_attention_backward",
        "_flash_attention_forward",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_cudnn_attention_backward",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_efficient_attention_backward",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    },
    "trainer/parallel/context/operator.py": {
        "torch._C._distributed_c10d._resolve_process_group",
        "torch._ops.OpOverload",
    },
    "trainer/parallel/context/ulysses.py": {
        "torch.distributed._functional_collectives.all_to_all_single_autograd"
    },
    "trainer/parallel/ddp.py": {"_foreach_copy_"},
    "trainer/parallel/fsdp.py": {
        "_get_post_forward_mesh_info",
        "_set_unshard_async_op",
        "_unflatten",
        "torch.distributed.fsdp._fully_shard._fsdp_common.FSDPMeshInfo",
        "torch.distributed.fsdp._fully_shard._fsdp_common.HSDPMeshInfo",
        "torch.distributed.fsdp._fully_shard._fully_shard",
    },
    "trainer/parallel/pipeline.py": {"torch.distributed.pipelining._backward.stage_backward"},
    "trainer/parallel/zero1.py": {
        "_chunk_cat",
        "_foreach_copy_",
        "torch.distributed.tensor.placement_types._StridedShard",
    },
    "trainer/program/activity.py": {"_get_sequence_number_for_group", "_world"},
    "trainer/program/torch_hooks.py": {
        *("_init_optim_state", "_torchdynamo_disable"),
        *("_MultiProcessingDataLoaderIter", "_shutdown_workers", "_next_data"),
        *("_num_yielded", "_num_workers"),
    },
    "trainer/rank/allreduce_check.py": {
        "torch._C._distributed_c10d.PrefixStore",
        "torch._C._distributed_c10d.Store",
        "torch._C._distributed_c10d.TCPStore",
    },
    "trainer/rank/evidence/flight.py": {
        "_dump_fr_trace",
        "_dump_nccl_trace",
        "torch._C._distributed_c10d",
    },
    "trainer/rank/heartbeat_store.py": {"torch._C._distributed_c10d.Store"},
    "trainer/rank/kept/orders.py": {"_abort_process_group"},
    "trainer/rank/ranks.py": {
        "_concatenate",
        "_flatten",
        "torch._C._distributed_c10d.HashStore",
        "torch._C._distributed_c10d.PrefixStore",
        "torch._C._distributed_c10d.Store",
        "torch._C._distributed_c10d.TCPStore",
        "torch.distributed.distributed_c10d._set_pg_timeout",
        "torch.distributed.distributed_c10d._world",
    },
    "trainer/rank/stores.py": {"torch._C._distributed_c10d.TCPStore"},
}

NOT_OF_TORCH = {
    # Python's own: os, namedtuple, atexit, threading, asyncio, runpy; site packages' entry points.
    *("_exit", "_asdict", "_fields", "_replace", "_run_exitfuncs", "_shutdown", "_log_traceback"),
    *("_run_module_as_main", "_filesbymodname"),
    # lightning, transformers (the last is a key of an OPT config)
    *("_TunerExitException", "_load_external_callbacks", "_save_checkpoint", "_get_output_dir"),
    "_remove_final_layer_norm",
    # texts that name no attribute: a mesh's name, operations in dumps of NCCL, a mark on a class
    *("_cp", "_broadcast_oop", "_reduce_oop", "_ndctl"),
}


def test_every_private_name_of_torch_in_the_source_is_listed() -> None:
    found = {file: names - NOT_OF_TORCH for file, names in private_names(ROOT).items()}
    assert {file: names for file, names in found.items() if names} == OF_TORCH


def test_torch_has_an_upper_bound_that_is_reviewed_with_the_list() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [one for one in project["dependencies"] if one.startswith("torch>")] == [BOUND]


def test_all_ways_to_use_a_private_name_are_found(tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "uses.py").write_text(
        "import torch._dynamo\n"
        "from torch._C import Store\n"
        "from torch.cuda import _lazy_init\n"
        "def _own(mesh):\n"
        "    mesh._own(), mesh._foreign(), getattr(mesh, '_by_name'), mesh.__class__\n"
        "    torch.cuda._own('_not a name'), 'torch._C._by_path'\n"
    )
    assert private_names(tmp_path) == {
        "trainer/uses.py": {
            *("torch._dynamo", "torch._C.Store", "torch.cuda._lazy_init"),
            *("_foreign", "_by_name", "_own", "torch._C._by_path"),
        }
    }


def private_names(root: Path) -> Mapping[str, set[str]]:
    """File -> private names that it uses and that the source does not define itself."""
    files = [file for top in SOURCE for file in sorted((root / top).rglob("*.py"))]
    texts = {str(file.relative_to(root)): file.read_text() for file in files}
    # Only files that mention torch: parsing all of them takes ten times as long.
    trees = {file: ast.parse(text) for file, text in texts.items() if "torch" in text}
    own = {name for tree in trees.values() for name in defined(tree)}
    names = defaultdict(set)
    for file, tree in trees.items():
        for name in used(tree, own):
            names[file].add(name)
    return names


def used(tree: ast.AST, own: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module)) if of_torch(module):
                paths = [f"{module}.{alias.name}" for alias in node.names]
                yield from filter(is_private, paths)
            case ast.Import():
                paths = [alias.name for alias in node.names if of_torch(alias.name)]
                yield from filter(is_private, paths)
            case ast.Attribute(attr=attribute) if PRIVATE.fullmatch(attribute):
                # The type of an object is unknown here. What is below `torch` is torch's in any
                # case; other private attributes are foreign if the source defines none like it.
                if attribute not in own or root_of(node) == "torch":
                    yield attribute
            case ast.Constant(value=str(text)) if IN_TEXT.fullmatch(text) and text not in own:
                yield text


def defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def of_torch(path: str) -> bool:
    return path.split(".")[0] == "torch"


def is_private(path: str) -> bool:
    return any(map(PRIVATE.fullmatch, path.split(".")))


def root_of(node: ast.Attribute) -> str:
    value: ast.expr = node
    while isinstance(value, ast.Attribute):
        value = value.value
    return value.id if isinstance(value, ast.Name) else ""
