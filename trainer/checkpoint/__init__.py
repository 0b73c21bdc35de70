"""Checkpoints: their content, when and how they are saved, and how a job resumes from one."""
