"""The texts below the fields of a struct, which Python itself does not keep."""

import ast
import functools
import inspect
import textwrap


@functools.cache
def docstrings(cls: type) -> tuple[str, dict[str, str]]:
    """The docstring of `cls`, and for each field, also of its parents, the docstring below it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    notes: dict[str, str] = {}
    for parent in cls.__bases__:
        if hasattr(parent, "__struct_fields__") and parent.__struct_fields__:
            notes |= docstrings(parent)[1]
    for above, below in zip(tree.body, tree.body[1:], strict=False):
        match above, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(str(text))):
                notes[name] = inspect.cleandoc(text)
    return ast.get_docstring(tree) or "", notes
