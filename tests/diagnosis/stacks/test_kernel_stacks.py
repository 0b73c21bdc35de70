"""The kernel function in which a task hangs, from stacks of Linux 5.15 and 6.8."""

from orchestrator.app.classification import classify_log
from orchestrator.diagnosis.stacks.kernel_stacks import place_of, place_of_process, with_places

NFS = """[<0>] rpc_wait_bit_killable+0x24/0xb0 [sunrpc]
[<0>] __rpc_execute+0x122/0x4b0 [sunrpc]
[<0>] nfs4_do_call_sync+0x6a/0xb0 [nfsv4]
[<0>] nfs_getattr+0x1a2/0x420 [nfs]
[<0>] vfs_statx+0x8d/0x170"""
IN_A_LOCK = """[<0>] __switch_to+0xbc/0x150
[<0>] rwsem_down_read_slowpath+0x2d1/0x4c0
[<0>] os_acquire_rwlock_read+0x33/0x50 [nvidia]
[<0>] _nv040123rm+0x10/0x40 [nvidia]"""
HUNG = """[ 8812.100001] INFO: task python3:4411 blocked for more than 122 seconds.
[ 8812.100002]       Tainted: P           OE     6.8.0-45-generic #45-Ubuntu
[ 8812.100004] task:python3         state:D stack:0     pid:4411  ppid:4400   flags:0x00004002
[ 8812.100005] Call Trace:
[ 8812.100006]  <TASK>
[ 8812.100007]  __schedule+0x27c/0x6b0
[ 8812.100008]  ? __pfx_uvm_open+0x10/0x10 [nvidia_uvm]
[ 8812.100009]  schedule+0x33/0x110
[ 8812.100010]  ll_file_io_generic+0x4a1/0xdc0 [lustre]
[ 8812.100011]  vfs_read+0xb5/0x1e0
[ 8812.200001] INFO: task kworker/1:2:77 blocked for more than 122 seconds."""


def test_the_first_function_below_the_scheduler_and_locks_is_the_place() -> None:
    assert place_of(NFS.splitlines()) == "rpc_wait_bit_killable of sunrpc"
    assert place_of(IN_A_LOCK.splitlines()) == "_nv040123rm of nvidia"
    assert place_of(["[<0>] do_sys_poll+0x3d1/0x5c0"]) == "do_sys_poll"
    assert place_of([]) == ""


def test_a_stack_of_only_wait_functions_still_has_a_place() -> None:
    assert place_of(["[<0>] futex_wait+0x1/0x2", "[<0>] do_syscall_64+0x5c/0xc0"]) == "futex_wait"
    assert place_of(["[<0>] schedule+0x33/0x110"]) == "schedule"


def test_without_access_to_the_stack_the_wait_channel_is_used() -> None:
    assert place_of_process("", "nfs_wait_bit_killable") == "nfs_wait_bit_killable"
    assert place_of_process(NFS, "rpc_wait_bit_killable") == "rpc_wait_bit_killable of sunrpc"
    assert place_of_process("", "0\n") == ""  # it runs, or this user may not look


def test_the_line_of_a_hung_task_names_the_place() -> None:
    lines = with_places(HUNG.splitlines())
    assert lines[0].endswith("more than 122 seconds, in ll_file_io_generic of lustre")
    assert lines[1:] == HUNG.splitlines()[1:]  # the second one has no stack below


def test_the_place_of_a_hung_task_decides_the_class() -> None:
    of_lustre = classify_log("", kernel=HUNG)
    assert (of_lustre.class_, of_lustre.excludes_host) == ("storage-error", False)
    of_the_driver = classify_log("", kernel=HUNG.replace("[lustre]", "[nvidia]"))
    assert (of_the_driver.class_, of_the_driver.excludes_host) == ("gpu-driver", True)
