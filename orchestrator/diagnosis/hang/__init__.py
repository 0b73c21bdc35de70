"""Who is to blame when ranks stand still: from dumps and stacks to a verdict. Pure."""
