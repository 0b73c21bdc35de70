"""What keys are called in other tools, and here.

From the command lines and files of torchrun, DeepSpeed, Accelerate, Slurm, Megatron-LM, torchtitan,
Hugging Face's Trainer, Lightning, SkyPilot and Kubernetes. Written in lower case with underscores.
"""

from collections.abc import Mapping

KEYS: Mapping[str, str] = {
    # torchrun
    "nnodes": "cluster.hosts",
    "nproc_per_node": "cluster.gpus_per_host",
    # DeepSpeed
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_clipping": "train.grad_clip",
    "zero_optimization": "parallel.data",
    "zero_stage": "parallel.data",
    "offload_optimizer": "parallel.fsdp.cpu_offload",
    "offload_param": "parallel.fsdp.cpu_offload",
    # Accelerate
    "num_machines": "cluster.hosts",
    "mixed_precision": "train.dtype",
    "fsdp_config": "parallel.fsdp",
    "fsdp_sharding_strategy": "parallel.fsdp.reshard_after_forward",
    "fsdp_offload_params": "parallel.fsdp.cpu_offload",
    "fsdp_transformer_layer_cls_to_wrap": "parallel.fsdp.wrap",
    # Slurm
    "nodes": "cluster.hosts",
    "num_nodes": "cluster.hosts",
    "ntasks_per_node": "cluster.gpus_per_host",
    "gpus_per_node": "cluster.gpus_per_host",
    "gpus": "cluster.gpus_per_host",
    "num_gpus": "cluster.gpus_per_host",
    "walltime": "cluster.slurm.time",
    "time_limit": "cluster.slurm.time",
    "job_name": "name",
    "chdir": "run.workdir",
    "working_dir": "run.workdir",
    # Megatron-LM
    "tensor_model_parallel_size": "parallel.tp",
    "pipeline_model_parallel_size": "parallel.pp",
    "context_parallel_size": "parallel.cp",
    "num_layers_per_virtual_pipeline_stage": "parallel.pipeline.stages_per_rank",
    "virtual_pipeline_model_parallel_size": "parallel.pipeline.stages_per_rank",
    "use_distributed_optimizer": "parallel.data",
    "seq_length": "data.sequence_length",
    "max_seq_length": "data.sequence_length",
    "train_iters": "train.steps",
    "lr_warmup_iters": "train.schedule.warmup_steps",
    "lr_decay_style": "train.schedule.kind",
    "lr_wsd_decay_iters": "train.schedule.decay_steps",
    "clip_grad": "train.grad_clip",
    "adam_beta1": "train.optimizer.beta1",
    "adam_beta2": "train.optimizer.beta2",
    "adam_eps": "train.optimizer.eps",
    "save_interval": "checkpoint.every_steps",
    "eval_interval": "train.eval_every",
    "data_path": "data.files",
    "tokenizer_model": "data.tokenizer",
    "recompute_granularity": "train.activation_checkpointing",
    "bf16": "train.dtype",
    "fp16": "train.dtype",
    "fp8": "train.float8",
    # torchtitan
    "dump_folder": "run_root",
    "enable_wandb": "train.wandb",
    "tokenizer_path": "data.tokenizer",
    "hf_assets_path": "data.tokenizer",
    "activation_checkpoint": "train.activation_checkpointing",
    "tensor_parallel_degree": "parallel.tp",
    "pipeline_parallel_degree": "parallel.pp",
    "context_parallel_degree": "parallel.cp",
    "data_parallel_shard_degree": "parallel.dp_shard",
    "data_parallel_replicate_degree": "parallel.dp_replicate",
    "seq_len": "data.sequence_length",
    "local_batch_size": "train.micro_batch_size",
    "max_norm": "train.grad_clip",
    # Hugging Face's Trainer
    "learning_rate": "train.optimizer.lr",
    "tensor_parallel": "parallel.tp",
    "tensor_parallel_size": "parallel.tp",
    "pipeline_parallel": "parallel.pp",
    "pipeline_parallel_size": "parallel.pp",
    "context_parallel": "parallel.cp",
    "max_steps": "train.steps",
    "num_steps": "train.steps",
    "max_grad_norm": "train.grad_clip",
    "per_device_train_batch_size": "train.micro_batch_size",
    "batch_size": "train.global_batch_size",
    "lr_scheduler_type": "train.schedule.kind",
    "min_lr_rate": "train.schedule.min_lr_factor",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep",
    "eval_steps": "train.eval_every",
    "output_dir": "run_root",
    "model_name_or_path": "model.path",
    "gradient_checkpointing": "train.activation_checkpointing",
    "report_to": "train.wandb",
    "wandb_project": "train.wandb",
    "dataset": "data.files",
    "torch_compile": "train.compile",
    # Lightning
    "devices": "cluster.gpus_per_host",
    "strategy": "parallel.data",
    "precision": "train.dtype",
    "gradient_clip_val": "train.grad_clip",
    "val_check_interval": "train.eval_every",
    "limit_val_batches": "train.eval_sequences",
    "default_root_dir": "run_root",
    "every_n_train_steps": "checkpoint.every_steps",
    "save_top_k": "checkpoint.keep",
    "seed_everything": "train.seed",
    # SkyPilot
    "accelerators": "cluster.gpus_per_host",
    "image_id": "cluster.kubernetes.image",
    "envs": "run.env",
    "max_restarts_on_errors": "resilience.max_restarts",
    # Kubernetes
    "backoff_limit": "resilience.max_restarts",
    "replicas": "cluster.hosts",
    "service_account_name": "cluster.kubernetes.service_account",
    "priority_class_name": "cluster.kubernetes.priority_class",
}
"""Name elsewhere -> key here."""

SENTENCES: Mapping[str, str] = {
    "min_lr": "did you mean train.schedule.min_lr_factor, a fraction of train.optimizer.lr?",
    "dp": "did you mean parallel.dp_shard (FSDP), or parallel.dp_replicate (DDP, HSDP)?",
    "data_parallel_size": "did you mean parallel.dp_shard (FSDP), or parallel.dp_replicate (DDP)?",
    "gradient_accumulation_steps": "remove it: it follows from train.global_batch_size,"
    " train.micro_batch_size and the number of ranks",
    "num_processes": "did you mean cluster.hosts and cluster.gpus_per_host? Their product is the"
    " number of processes",
    "world_size": "did you mean cluster.hosts and cluster.gpus_per_host? Their product is it",
    "ntasks": "did you mean cluster.hosts and cluster.gpus_per_host? Their product is it",
    "num_train_epochs": "did you mean train.steps? An epoch has as many steps as the data has"
    " sequences, divided by train.global_batch_size",
    "epochs": "did you mean train.steps? An epoch has as many steps as the data has sequences,"
    " divided by train.global_batch_size",
    "max_epochs": "did you mean train.steps? An epoch has as many steps as the data has sequences,"
    " divided by train.global_batch_size",
    "accumulate_grad_batches": "remove it: it follows from train.global_batch_size,"
    " train.micro_batch_size and the number of ranks",
    "accelerator": "remove it: ranks use the GPUs that they see, else the CPU",
    "resources": "did you mean cluster.gpus_per_host (GPUs), or cluster.kubernetes.cpu and memory?",
    "limits": "did you mean cluster.gpus_per_host (GPUs), or cluster.kubernetes.cpu and memory?",
    "requests": "did you mean cluster.gpus_per_host (GPUs), or cluster.kubernetes.cpu and memory?",
    "volume_mounts": "did you mean cluster.kubernetes.volumes:"
    " [{name: …, mount_path: …, claim: …}]?",
    "containers": "did you mean cluster.kubernetes.image? Other keys of pods: pod_template there",
    "restart_policy": "remove it: ndctl restarts ranks itself, at most resilience.max_restarts"
    " times",
    "master_addr": "remove it: ndctl finds the address of the first host itself",
    "master_port": "remove it: ndctl takes a free port itself",
    "main_process_port": "remove it: ndctl takes a free port itself",
    "main_process_ip": "remove it: ndctl finds the address of the first host itself",
    "rdzv_endpoint": "remove it: ndctl brings the ranks together itself",
    "rdzv_backend": "remove it: ndctl brings the ranks together itself",
    "rdzv_id": "remove it: ndctl brings the ranks together itself",
    "node_rank": "remove it: ndctl numbers the hosts itself",
    "machine_rank": "remove it: ndctl numbers the hosts itself",
    "sequence_parallel": "remove it: with parallel.tp the sequence is always split as well",
    "array": "leave it out, and submit with --sweep KEY=A,B",
    "dependency": "leave it out, and submit with --after JOB",
    "output": "remove it: logs are in logs/ of the run directory; `ndctl logs JOB` prints them",
    "error": "remove it: logs are in logs/ of the run directory; `ndctl logs JOB` prints them",
    "flavor": "did you mean model.preset, such as llama3-8b?",
    "num_layers": "did you mean model.config: {num_hidden_layers: …}?",
    "hidden_size": "did you mean model.config: {hidden_size: …}?",
    "num_attention_heads": "did you mean model.config: {num_attention_heads: …}?",
}
"""Name elsewhere -> a fix that is more than another name."""

IN_RUN_DIR = "remove it: checkpoints are in checkpoints/ of the run directory, below run_root"
AT: Mapping[str, str] = {
    "checkpoint.dir": IN_RUN_DIR,
    "checkpoint.folder": IN_RUN_DIR,
    "checkpoint.path": IN_RUN_DIR,
    "checkpoint.interval": "did you mean checkpoint.every_steps?",
    "checkpoint.save_every": "did you mean checkpoint.every_steps?",
    "model.name": "did you mean model.preset, or model.path with a folder or a hub id?",
    "model.size": "did you mean model.preset, such as llama3-8b?",
    "model.type": "did you mean model.config: {model_type: …}?",
}
"""Path of a key -> a fix, where its last word alone would mislead."""
