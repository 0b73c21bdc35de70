"""Published training runs and kernel speeds, as data with their sources.

`sources.toml` says where each row comes from and what it leaves out. torchtitan's benchmarks and
NVIDIA's performance summaries (NeMo, Megatron-Bridge) are not here on purpose: the planner is
accepted on them.
"""
