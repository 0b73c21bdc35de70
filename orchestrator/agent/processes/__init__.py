"""The processes of an agent: fork server, torchrun, and the watcher of each rank."""
