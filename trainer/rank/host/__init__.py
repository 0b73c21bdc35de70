"""How the process of a rank runs on its host: on which processors, and when it collects garbage."""
