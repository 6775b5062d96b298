"""Evaluates statements: assignments, conditions, loops, functions, redirections, pipelines. Commands are in `commands`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from tree_sitter import Node

from fuligo.importer import arithmetic, assignments, commands, conditions, redirections, words
from fuligo.importer.call import Call, Shell
from fuligo.importer.control import FunctionReturn, LoopControl, ScriptExit
from fuligo.importer.patterns import glob_pattern, matches
from fuligo.importer.state import Function, Input, State, Streams
from fuligo.importer.syntax import first_line, line_of, parse_script, spaced_assignment, text_of


class Interpreter:
    """One shell, or a subshell of one."""

    def __init__(self, state: State) -> None:
        self.state = state

    # -- statements --------------------------------------------------------------------------------------------------------------------

    def run(self, node: Node, streams: Streams) -> int:
        """Evaluate one statement; its exit status.

        Raises:
            ConfigError: a command that is not known, an unset variable, or bash that is not understood; names the line.
            ScriptExit: the script ends here.
            LimitError: it costs too much.
        """
        self.state.budget.step()
        self.state.findings.place = self.state.place(line_of(node))
        handler = _STATEMENTS.get(node.type)
        if handler is None:
            raise self.state.error(line_of(node), f"`{first_line(node)}` is not understood ({node.type.replace('_', ' ')})")
        if node.type in _SIMPLE:
            self.state.budget.spend(node.end_byte - node.start_byte)
        status = handler(self, node, streams)
        self.state.status = status
        return status

    def sequence(self, nodes: Iterable[Node], streams: Streams) -> int:
        """Statements one after the other. Those in the background (`&`) are evaluated like others: nothing takes any time here."""
        status = 0
        for node in nodes:
            if not node.is_named or node.type in ("comment", "heredoc_body"):
                continue
            status = self.run(node, streams)
            ends = status != 0 and "errexit" in self.state.options and not self.state.tests
            if ends and node.type not in ("negated_command", "if_statement", "while_statement", "for_statement", "list"):
                raise ScriptExit(status, line_of(node))
        return status

    def condition(self, nodes: Iterable[Node], streams: Streams) -> bool:
        """Whether statements succeed, where a failure is an answer."""
        self.state.tests += 1
        try:
            return self.sequence(nodes, streams) == 0
        finally:
            self.state.tests -= 1

    def source(self, path: Path, text: bytes, streams: Streams) -> int:
        """Evaluate a file in this shell."""
        root = parse_script(text, path.name)
        self.state.budget.enter()
        self.state.sources.append(path)
        try:
            return self.sequence(root.children, streams)
        except FunctionReturn as ended:
            return ended.status
        except LoopControl:  # outside of a loop it does nothing but end the file
            return 0
        finally:
            self.state.sources.pop()
            self.state.budget.leave()

    def call(self, function: Function, arguments: list[str], streams: Streams) -> int:
        """A function of the script, with locals of its own."""
        state = self.state
        state.budget.enter()
        state.variables.append({})
        state.sources.append(function.file)
        positional, state.positional = state.positional, arguments
        try:
            return self.run(function.body, streams)
        except FunctionReturn as ended:
            return ended.status
        finally:
            state.positional = positional
            state.sources.pop()
            state.variables.pop()
            state.budget.leave()

    def substitute(self, node: Node) -> str:
        """What the commands in `$(...)` print, without the line ends behind it."""
        streams = Streams()

        def capture(shell: Shell) -> int:
            shell.state.captures = True
            return shell.sequence(node.children, streams)

        self.state.status = self.in_subshell(capture)
        text = "".join(streams.stdout).rstrip("\n")
        self.state.budget.spend(len(text))
        return text

    def in_subshell(self, work: Callable[[Shell], int]) -> int:
        """Do `work` in a shell whose changes are forgotten; `exit` ends it alone."""
        self.state.budget.enter()
        try:
            return work(Interpreter(self.state.fork()))
        except (ScriptExit, FunctionReturn) as ended:
            return ended.status
        except LoopControl:
            return 0
        finally:
            self.state.budget.leave()

    # -- simple statements -------------------------------------------------------------------------------------------------------------

    def command(self, node: Node, streams: Streams) -> int:
        """A function, a built-in, a stand-in, a launch, or a chore that is skipped; everything else is an error."""
        name_node = node.child_by_field_name("name")
        assert name_node is not None
        arguments = words.fields(self, [*name_node.children, *node.children_by_field_name("argument")])
        streams = redirections.with_herestring(self, node, streams)
        if not arguments:
            return 0
        prefixed = dict(assignments.assigned(self, child) for child in node.children if child.type == "variable_assignment")
        if (spaced := spaced_assignment(first_line(node))) and arguments[1:] and arguments[1].startswith(("=", "+=")):
            raise self.state.error(line_of(node), f"`{first_line(node)}` runs a command called {arguments[0]}{spaced}")
        if arguments[0] in self.state.functions:
            return self.call(self.state.functions[arguments[0]], arguments[1:], streams)
        call = Call(arguments[0], tuple(arguments[1:]), line_of(node), {k: str(v) for k, v in prefixed.items() if isinstance(v, str)})
        return commands.run(self, call, streams)

    def declaration(self, node: Node, streams: Streams) -> int:
        """`export`, `local`, `declare`, `readonly`."""
        keyword = text_of(node.children[0])
        for child in node.named_children:
            if child.type == "word" and text_of(child) in ("-x", "-r", "-g", "-a", "-i", "--"):
                continue
            if child.type == "variable_assignment":
                name, value = assignments.assigned(self, child)
            elif child.type == "variable_name":
                name = text_of(child)
                value = self.state.get(name) if keyword in ("export", "readonly") else ""
            else:
                raise self.state.error(line_of(node), f"`{first_line(node)}` is not understood")
            if value is not None:
                local = keyword == "local" or (keyword == "declare" and len(self.state.variables) > 1)
                (self.state.set_local if local else self.state.set)(name, value)
            if keyword == "export":
                self.state.exported.add(name)
        return 0

    def unset(self, node: Node, streams: Streams) -> int:
        for child in node.named_children:
            if child.type != "word" or not text_of(child).startswith("-"):
                self.state.unset(text_of(child))
        return 0

    # -- compound statements -----------------------------------------------------------------------------------------------------------

    def if_statement(self, node: Node, streams: Streams) -> int:
        """Also of `elif`: the same shape."""
        tested, body, alternatives, in_body = [], [], [], False
        for child in node.children:
            if child.type in ("elif_clause", "else_clause"):
                alternatives.append(child)
            elif not child.is_named and child.type == "then":
                in_body = True
            elif child.is_named:
                (body if in_body else tested).append(child)
        if self.condition(tested, streams):
            return self.sequence(body, streams)
        for clause in alternatives:
            if clause.type == "else_clause":
                return self.sequence(clause.children, streams)
            if self.condition(_before(clause, "then"), streams):
                return self.sequence(_after(clause, "then"), streams)
        return 0

    def for_statement(self, node: Node, streams: Streams) -> int:
        variable, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
        assert variable is not None and body is not None
        if node.children[0].type == "select":
            raise self.state.error(line_of(node), "`select` asks its user, which nobody can answer here")
        given = node.children_by_field_name("value")
        if any(child.type == "word" and set("*?[") & set(text_of(child)) for child in given):
            raise self.state.error(line_of(node), f"`{first_line(node)}`: file names are not looked up; write the words out")
        has_words = any(not child.is_named and child.type == "in" for child in node.children)
        values = words.fields(self, given) if has_words else list(self.state.positional)

        remaining = iter(values)

        def next_round() -> bool:
            value = next(remaining, None)
            if value is not None:
                self.state.set(text_of(variable), value)
            return value is not None

        return self._loop(next_round, body, streams)

    def c_style_for(self, node: Node, streams: Streams) -> int:
        body = node.child_by_field_name("body")
        assert body is not None
        parts: list[Node | None] = [None]
        for child in node.children[2:]:
            if not child.is_named and child.type == "))":
                break
            if not child.is_named and child.type == ";":
                parts.append(None)
            elif child.is_named:
                parts[-1] = child
        start, condition, update = [*parts, None, None][:3]
        if start is not None:
            arithmetic.evaluate(self.state, start)
        started = False

        def next_round() -> bool:
            nonlocal started
            if started and update is not None:
                arithmetic.evaluate(self.state, update)
            started = True
            return condition is None or arithmetic.evaluate(self.state, condition) != 0

        return self._loop(next_round, body, streams)

    def while_statement(self, node: Node, streams: Streams) -> int:
        body = node.child_by_field_name("body")
        assert body is not None
        tested = [child for child in node.named_children if child != body]
        wanted = node.children[0].type == "while"
        return self._loop(lambda: self.condition(tested, streams) == wanted, body, streams)

    def _loop(self, next_round: Callable[[], bool], body: Node, streams: Streams) -> int:
        status = 0
        while next_round():
            self.state.budget.step()
            try:
                status = self.sequence(body.children, streams)
            except LoopControl as control:
                if control.levels > 1:
                    raise LoopControl(control.levels - 1, control.goes_on) from None
                if not control.goes_on:
                    break
        return status

    def case_statement(self, node: Node, streams: Streams) -> int:
        value_node = node.child_by_field_name("value")
        assert value_node is not None
        value = words.text(self, value_node)
        self.state.budget.spend((len(value) + 1) * len(node.named_children))
        for item in node.named_children:
            if item.type != "case_item":
                continue
            patterns = item.children_by_field_name("value")
            if any(matches(glob_pattern(words.pattern_parts(self, pattern)), value) for pattern in patterns):
                return self.sequence(_after(item, ")"), streams)
        return 0

    def and_or(self, node: Node, streams: Streams) -> int:
        left, right = node.named_children[0], node.named_children[-1]
        wanted = text_of(node.children[1]) == "&&"
        if self.condition([left], streams) != wanted:
            return self.state.status
        status = self.run(right, streams)
        if status != 0 and "errexit" in self.state.options and not self.state.tests and right.type in ("command", "subshell", "pipeline"):
            raise ScriptExit(status, line_of(right))
        return status

    def pipeline(self, node: Node, streams: Streams) -> int:
        stages = node.named_children
        statuses = []
        source = streams.stdin
        for stage in stages:
            output = streams.stdout if stage == stages[-1] else []
            piped = Streams(source, output)
            statuses.append(self.in_subshell(lambda shell, stage=stage, piped=piped: shell.run(stage, piped)))
            source = Input("".join(output)) if stage != stages[-1] else source
        if "pipefail" in self.state.options:
            return next((status for status in reversed(statuses) if status), 0)
        return statuses[-1]

    def redirected(self, node: Node, streams: Streams) -> int:
        """Files that are written exist in memory only."""
        body = node.child_by_field_name("body")
        if body is None:
            raise self.state.error(line_of(node), f"`{first_line(node)}` redirects no command")
        inner, writes = redirections.applied(self, node, streams)
        try:
            return self.run(body, inner)
        finally:
            for path, appends in writes:
                self.state.files.write(path, "".join(inner.stdout), appends)

    def compound(self, node: Node, streams: Streams) -> int:
        if text_of(node.children[0]) == "((":
            return int(arithmetic.evaluate(self.state, node) == 0)
        return self.sequence(node.children, streams)

    def subshell(self, node: Node, streams: Streams) -> int:
        return self.in_subshell(lambda shell: shell.sequence(node.children, streams))

    def define(self, node: Node, streams: Streams) -> int:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        assert name is not None and body is not None
        self.state.functions[text_of(name)] = Function(body, self.state.sources[-1])
        return 0

    def assignments(self, node: Node, streams: Streams) -> int:
        self.state.status = 0
        for child in [node] if node.type == "variable_assignment" else node.named_children:
            self.state.set(*assignments.assigned(self, child))
        return self.state.status  # of a substitution in the value

    def negated(self, node: Node, streams: Streams) -> int:
        return int(self.condition([node.named_children[-1]], streams))

    def test(self, node: Node, streams: Streams) -> int:
        return int(not conditions.evaluate(self, node))


def _before(node: Node, token: str) -> list[Node]:
    position = next(index for index, child in enumerate(node.children) if not child.is_named and child.type == token)
    return [child for child in node.children[:position] if child.is_named]


def _after(node: Node, token: str) -> list[Node]:
    position = next(index for index, child in enumerate(node.children) if not child.is_named and child.type == token)
    return [child for child in node.children[position + 1 :] if child.is_named]


_SIMPLE = ("command", "variable_assignment", "declaration_command", "test_command", "redirected_statement", "compound_statement")
"""Statements whose text is counted each time that they are evaluated; others consist of these."""
_Handler = Callable[[Interpreter, Node, Streams], int]
_STATEMENTS: dict[str, _Handler] = {
    "command": Interpreter.command,
    "variable_assignment": Interpreter.assignments,
    "variable_assignments": Interpreter.assignments,
    "declaration_command": Interpreter.declaration,
    "unset_command": Interpreter.unset,
    "if_statement": Interpreter.if_statement,
    "for_statement": Interpreter.for_statement,
    "c_style_for_statement": Interpreter.c_style_for,
    "while_statement": Interpreter.while_statement,
    "case_statement": Interpreter.case_statement,
    "list": Interpreter.and_or,
    "pipeline": Interpreter.pipeline,
    "redirected_statement": Interpreter.redirected,
    "compound_statement": Interpreter.compound,
    "subshell": Interpreter.subshell,
    "function_definition": Interpreter.define,
    "negated_command": Interpreter.negated,
    "test_command": Interpreter.test,
}
