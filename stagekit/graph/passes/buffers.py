"""Who reads and writes a parameter, buffer or input, so that a cut may part them: copies for readers, early write-backs.

A buffer that forward assigns (`self.steps = self.steps + 1`) is written back at the end of an exported graph, and would
hold all of it together; whoever reads a written buffer later, or needs its old value for backward, reads a copy.
graph.capture calls these passes until nothing changes; what a node writes is decided in graph.passes.aliasing.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch
from torch import fx

from stagekit.graph.passes.aliasing import nodes_by_storage, schema_name, written_inputs

_COPY = torch.ops.aten.copy_.default
_CLONE = torch.ops.aten.clone.default


def clone_written_inputs(graph: fx.Graph, storage_of: Mapping[str, int], inputs: set[str]) -> bool:
    """Clone on entry each graph input (by placeholder name) whose memory some node writes; tell if any was."""
    written = {storage_of.get(target.name) for node in graph.nodes for target in written_inputs(node)}
    changed = False
    for placeholder in [n for n in graph.nodes if n.op == "placeholder" and n.name in inputs]:
        if storage_of.get(placeholder.name, -1) not in written:
            continue
        clone = _clone_on_entry(graph, placeholder)
        placeholder.replace_all_uses_with(clone, delete_user_cb=lambda user, c=clone: user is not c)
        changed = True
    return changed


def _clone_on_entry(graph: fx.Graph, placeholder: fx.Node) -> fx.Node:
    with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
        clone = graph.call_function(_CLONE, (placeholder,))
    clone.meta = {**placeholder.meta, "context": ()}
    return clone


def write_back_early(graph: fx.Graph, storage_of: Mapping[str, int]) -> bool:
    """Write a buffer that forward assigned as soon as nobody reads the old value any more; tell if anything changed."""
    changed = False
    for node in list(graph.nodes):
        if node.target is not _COPY or node.users or node.args[0].op != "placeholder":
            continue
        target, source = node.args[:2]
        if isinstance(source, fx.Node) and _unwritten(source) is target:  # `self.steps += 1` wrote it already
            graph.erase_node(node)
            changed = True
            continue
        changed |= _keep_old_value(graph, storage_of, node) or _move_up(storage_of, node)
    return changed


def _unwritten(node: fx.Node) -> fx.Node:
    """Return the tensor that a chain of in-place operations has returned as `node`."""
    while schema_name(node).startswith("aten::") and written_inputs(node) == [node.args[0]]:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _keep_old_value(graph: fx.Graph, storage_of: Mapping[str, int], write: fx.Node) -> bool:
    """Let those who need the old value in backward read a copy of it: an assignment would have left them the old tensor."""
    target = write.args[0]
    assert isinstance(target, fx.Node)
    order = {node: i for i, node in enumerate(graph.nodes)}
    same = nodes_by_storage(graph, storage_of).get(storage_of.get(target.name, -1), [])
    readers = {
        user
        for user in target.users
        if order[user] < order[write] and user not in same and user.meta.get("requires_grad")
    }
    earlier = (node for node in graph.nodes if order[node] < order[write])
    if not readers or target.meta.get("requires_grad") or any(_writes_one_of(node, same) for node in earlier):
        return False
    clone = _clone_on_entry(graph, target)
    target.replace_all_uses_with(clone, delete_user_cb=readers.__contains__)
    return True


def _move_up(storage_of: Mapping[str, int], write: fx.Node) -> bool:
    """Move a write-back to right after the last node that touches what it writes, or makes what it writes there."""
    target, source = (storage_of.get(arg.name) if isinstance(arg, fx.Node) else None for arg in write.args[:2])
    passed, last = 0, write.prev
    while last.op != "placeholder" and last is not write.args[1]:
        touched = {storage_of.get(n.name) for n in (last, *last.all_input_nodes)} - {None}
        if target in touched or source in {storage_of.get(n.name) for n in written_inputs(last)} - {None}:
            break
        passed += last.target is not _COPY
        last = last.prev
    if not passed:
        return False
    last.append(write)
    return True


def _writes_one_of(node: fx.Node, values: Container[fx.Node]) -> bool:
    return any(target in values for target in written_inputs(node))


def snapshot_buffers(graph: fx.Graph, storage_of: Mapping[str, int], states: set[str]) -> bool:
    """Let readers of a state after its last write read a copy, which may cross a cut; the state has one owner.

    What other chunks write later leaves the copy alone, so it may be kept for backward. `states`: placeholder names of
    parameters, buffers and constants. Tells whether any copy was made.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    sharing = nodes_by_storage(graph, storage_of)
    changed = False
    for placeholder in [n for n in graph.nodes if n.op == "placeholder" and n.name in states]:
        same = sharing.get(storage_of.get(placeholder.name, -1), [])
        writers = [node for node in graph.nodes if _writes_one_of(node, same)]
        if not writers:
            continue
        last = writers[-1]
        late = {user for node in same for user in node.users if order[user] > order[last]}
        read = [node for node in same if not late.isdisjoint(node.users) and order[node] <= order[last]]
        if (
            not late
            or all(user.target is _CLONE for user in late)
            or not all(_repeatable(n, placeholder, same) for n in read)
        ):
            continue
        with graph.inserting_after(last):
            copy = graph.call_function(_CLONE, (placeholder,))
        # whoever wrote without gradients, those who read may want one
        copy.meta = {**last.meta, "val": placeholder.meta["val"], "context": ()}
        copies = {placeholder: copy}
        for node in read:
            node.replace_all_uses_with(_repeated(node, copies), delete_user_cb=late.__contains__)
        changed = True
    return changed


def _repeatable(node: fx.Node, placeholder: fx.Node, same: Container[fx.Node]) -> bool:
    """Tell whether the node is the state, or a chain of views and in-place operations of it."""
    while node is not placeholder:
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or source not in same or (_unwritten(node) is node and not _is_view(node)):
            return False
        node = source
    return True


def _is_view(node: fx.Node) -> bool:
    return schema_name(node).startswith("aten::") and not written_inputs(node)


def _repeated(node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """Return what `node`, an alias of the state, is of the copy."""
    if node not in copies:
        source = _repeated(node.args[0], copies)  # type: ignore[arg-type]
        copies[node] = source
        if _is_view(node):
            with node.graph.inserting_after(source):
                copies[node] = node.graph.node_copy(node, lambda n: source if n is node.args[0] else n)
    return copies[node]
