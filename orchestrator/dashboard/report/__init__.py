"""`ndctl report`: the story of a job and its incidents, as one file of HTML or Markdown."""
