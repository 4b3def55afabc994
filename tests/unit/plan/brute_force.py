"""Says of action lists why they are bad, by counting and by running them step by step; shares no code with the verifier."""

from collections import Counter, defaultdict
from itertools import pairwise

from stagekit.plan.actions import Action, Op

CREDITS = 8
KINDS = {Op.SEND_F: "F", Op.RECV_F: "F", Op.SEND_B: "B", Op.RECV_B: "B", Op.SEND_X: "X", Op.RECV_X: "X"}
SENDS = (Op.SEND_F, Op.SEND_B, Op.SEND_X)


def key(action):
    """(kind, from stage, to stage, chunk) of a transfer, equal at both of its ends."""
    ends = (action.stage, action.peer) if action.op in SENDS else (action.peer, action.stage)
    return (KINDS[action.op], *ends, action.chunk)


def expected(stage_ranks, chunks, routes, *, trains, halved):
    """Count what each rank has to list; `halved` (stage, chunk) pairs have I and W."""
    wanted = [Counter() for _ in range(max(stage_ranks) + 1)]

    def transfer(send, receive, source, target, chunk):
        if stage_ranks[source] != stage_ranks[target]:
            wanted[stage_ranks[source]][Action(send, source, chunk, target)] += 1
            wanted[stage_ranks[target]][Action(receive, target, chunk, source)] += 1

    for chunk in range(chunks):
        for stage, rank in enumerate(stage_ranks):
            backward = ((Op.I, Op.W) if (stage, chunk) in halved else (Op.B,)) if trains else ()
            for op in (Op.F, *backward):
                wanted[rank][Action(op, stage, chunk)] += 1
        for source, target in routes.forward:
            transfer(Op.SEND_F, Op.RECV_F, source, target, chunk)
        for source, target in routes.backward if trains else ():
            transfer(Op.SEND_B, Op.RECV_B, target, source, chunk)
    for source, target in routes.inputs:
        transfer(Op.SEND_X, Op.RECV_X, source, target, 0)
    for stage in routes.reduced:
        wanted[stage_ranks[stage]][Action(Op.REDUCE, stage, 0)] += 1
    for number, group in enumerate(routes.ties):
        for rank in {stage_ranks[stage] for stage in group}:
            wanted[rank][Action(Op.TIE_SUM, group[0], number)] += 1
    return wanted


def reasons(lists, stage_ranks, chunks, routes, transport):
    """Return all that is wrong: missing, twice, foreign, both, order, channel, deadlock. Empty: a good schedule."""
    found = set()
    trains = bool(routes.backward) or any(a.op in (Op.B, Op.I, Op.W) for row in lists for a in row)
    have = {(a.op, a.stage, a.chunk) for row in lists for a in row}
    halved = {(s, c) for op, s, c in have if op in (Op.I, Op.W)}
    if any((Op.B, s, c) in have for s, c in halved):
        found.add("both")
    for row, wanted in zip(lists, expected(stage_ranks, chunks, routes, trains=trains, halved=halved), strict=True):
        listed = Counter(row)
        if wanted - listed:
            found.add("missing")
        if any(action not in wanted for action in listed):
            found.add("foreign")
        if any(count > 1 for count in listed.values()):
            found.add("twice")
    if any(local_order_is_wrong(row, routes) for row in lists):
        found.add("order")
    if channels_differ(lists, stage_ranks):
        found.add("channel")
    if not found and not runs_to_its_end(lists, stage_ranks, routes, transport):
        found.add("deadlock")
    return found


def local_order_is_wrong(row, routes):
    at = {}
    for position, action in enumerate(row):
        at.setdefault((action.op, action.stage, action.chunk), position)
    last = defaultdict(int)
    for position, a in enumerate(row):
        f, i, b = (at.get((op, a.stage, a.chunk)) for op in (Op.F, Op.I, Op.B))
        backward = i if i is not None else b
        before = {Op.B: f, Op.I: f, Op.SEND_F: f, Op.SEND_B: backward, Op.W: i if i is not None else f}.get(a.op)
        after = {Op.RECV_F: f, Op.RECV_B: backward}.get(a.op)
        if a.op is Op.RECV_X:
            after = min((p for (op, s, _), p in at.items() if op is Op.F and s == a.stage), default=None)
        if (before is not None and position < before) or (after is not None and position > after):
            return True
        if a.op in (Op.B, Op.W, Op.REDUCE):
            last[a.stage] = position
    for position, a in enumerate(row):
        if a.op is Op.REDUCE and position < last[a.stage]:
            return True
        if a.op is Op.TIE_SUM and a.chunk < len(routes.ties):
            held = {x.stage for x in row if x.op is Op.F} & set(routes.ties[a.chunk])
            if any(position < last[stage] for stage in held):
                return True
    return False


def channels_differ(lists, stage_ranks):
    sides = {True: defaultdict(list), False: defaultdict(list)}
    for row in lists:
        for a in row:
            if (
                a.op in KINDS
                and a.peer is not None
                and 0 <= a.peer < len(stage_ranks)
                and 0 <= a.stage < len(stage_ranks)
            ):
                kind, source, target, _ = key(a)
                sides[a.op in SENDS][stage_ranks[source], stage_ranks[target], kind].append(key(a))
    return sides[True] != sides[False]


def runs_to_its_end(lists, stage_ranks, routes, transport):
    """Run every rank as far as it comes, deliver what can be delivered, and again, until nothing moves."""
    state = State(lists, stage_ranks, routes, transport)
    while state.advance() or state.deliver():
        pass
    return all(pc == len(row) for pc, row in zip(state.pc, lists, strict=True))


class State:
    def __init__(self, lists, stage_ranks, routes, transport):
        self.lists, self.stage_ranks, self.routes, self.transport = lists, stage_ranks, routes, str(transport)
        self.pc = [0] * len(lists)
        self.done, self.sent, self.posted, self.arrived = set(), [], set(), set()
        self.ends = defaultdict(list)  # (rank, queue) → messages not yet arrived, in the order posted there
        self.credits = defaultdict(list)
        self.trains = any(a.op in (Op.B, Op.I) for row in lists for a in row)

    def advance(self):
        moved = False
        for rank, row in enumerate(self.lists):
            while self.pc[rank] < len(row) and self.may_run(rank, row):
                self.note(rank, row[self.pc[rank]])
                self.pc[rank] += 1
                moved = True
        return moved

    def may_run(self, rank, row):
        before = row[self.pc[rank] - 1] if self.pc[rank] else None
        if before is not None and before.op is Op.TIE_SUM and not self.all_came_to(before):
            return False
        a = row[self.pc[rank]]
        if a.op is Op.F:
            wanted = [("F", s, a.stage, a.chunk) for s, t in self.routes.forward if t == a.stage]
            wanted += [("X", s, a.stage, 0) for s, t in self.routes.inputs if t == a.stage]
        elif a.op in (Op.B, Op.I):
            wanted = [("B", t, a.stage, a.chunk) for s, t in self.routes.backward if s == a.stage]
        elif a.op in (Op.SEND_F, Op.SEND_B) and self.uses_credit(a):
            queue = self.credits[a.stage, self.stage_ranks[a.peer]]
            return len(queue) < CREDITS or queue[-CREDITS] in self.arrived
        else:
            return True
        return all(self.is_there(message) for message in wanted)

    def uses_credit(self, a):
        if self.transport in ("implicit", "eager"):
            return False
        return a.op is Op.SEND_B or not (self.trains and (a.stage, a.peer) in self.routes.backward)

    def is_there(self, message):
        kind, source, target, chunk = message
        if self.stage_ranks[source] == self.stage_ranks[target] or self.transport == "implicit":
            return kind == "X" or (kind, source, chunk) in self.done
        return message in self.arrived

    def all_came_to(self, tie):
        return all(tie not in row or row.index(tie) < self.pc[rank] for rank, row in enumerate(self.lists))

    def note(self, rank, a):
        if a.op in (Op.F, Op.B, Op.I):
            self.done.add(("F" if a.op is Op.F else "B", a.stage, a.chunk))
        if a.op not in KINDS:
            return
        message = key(a)
        if a.op in SENDS:
            self.sent.append(message)
            if a.op is not Op.SEND_X and self.uses_credit(a):
                self.credits[a.stage, self.stage_ranks[a.peer]].append(message)
        else:
            self.posted.add(message)
        self.ends[rank, self.queue(message)].append(message)

    def queue(self, message):
        _, source, target, _ = message
        ends = (self.stage_ranks[source], self.stage_ranks[target])
        if self.transport == "directed":
            return ends
        return tuple(sorted(ends)) if self.transport == "ordered" else message

    def deliver(self):
        moved = False
        for message in self.sent:
            if message in self.arrived:
                continue
            sides = [self.ends[self.stage_ranks[stage], self.queue(message)] for stage in message[1:3]]
            if self.transport in ("implicit", "eager") or (
                message in self.posted and all(side and side[0] == message for side in sides)
            ):
                self.arrived.add(message)
                for side in sides:
                    if message in side:
                        side.remove(message)
                moved = True
        return moved


def times(lists, stage_ranks, routes, transport, durations, hop):
    """Return the end of each compute action: the smallest times that satisfy every rule, found by trying until none changes.

    `durations[op][stage]`; the lists are good ones.
    """
    state = State(lists, stage_ranks, routes, transport)  # for its rules about queues and credits
    ends, arrivals = [[0] * len(row) for row in lists], defaultdict(int)
    posted_at, queues, credit = defaultdict(list), defaultdict(list), {}
    for rank, row in enumerate(lists):
        sent = defaultdict(list)
        for position, a in enumerate(row):
            if a.op not in KINDS:
                continue
            message = key(a)
            if a.op in SENDS or str(transport) not in ("implicit", "eager"):
                posted_at[message].append((rank, position))
                queues[rank, state.queue(message)].append(message)
            if a.op in (Op.SEND_F, Op.SEND_B) and state.uses_credit(a):
                line = sent[a.stage, stage_ranks[a.peer]]
                line.append(message)
                if len(line) > CREDITS:
                    credit[rank, position] = line[-1 - CREDITS]
    behind = defaultdict(list)  # message → those before it in a queue
    for line in queues.values():
        for before, after in pairwise(line):
            behind[after].append(before)
    made = {
        (KIND_MADE[a.op], a.stage, a.chunk): (r, i)
        for r, row in enumerate(lists)
        for i, a in enumerate(row)
        if a.op in KIND_MADE
    }
    changed = True
    while changed:
        changed = False
        for message, places in posted_at.items():
            at = hop + max([ends[r][i] for r, i in places] + [arrivals[m] for m in behind[message]])
            changed, arrivals[message] = changed or at != arrivals[message], at
        for rank, row in enumerate(lists):
            for position, a in enumerate(row):
                at = ends[rank][position - 1] if position else 0
                at = max(
                    [at] + [there(m, made, ends, arrivals, stage_ranks, transport, hop) for m in inputs_of(a, routes)]
                )
                if (rank, position) in credit:
                    at = max(at, arrivals[credit[rank, position]])
                at += durations[a.op][a.stage] if a.op in durations else 0
                changed, ends[rank][position] = changed or at != ends[rank][position], at
    return {
        (a.op.value, a.stage, a.chunk): ends[r][i]
        for r, row in enumerate(lists)
        for i, a in enumerate(row)
        if a.op in durations
    }


KIND_MADE = {Op.F: "F", Op.B: "B", Op.I: "B"}


def inputs_of(a, routes):
    """The messages that a compute action waits for, also those that never leave its rank."""
    if a.op is Op.F:
        arriving = [("F", s, a.stage, a.chunk) for s, t in routes.forward if t == a.stage]
        return arriving + [("X", s, a.stage, 0) for s, t in routes.inputs if t == a.stage]
    return [("B", t, a.stage, a.chunk) for s, t in routes.backward if s == a.stage and a.op in (Op.B, Op.I)]


def there(message, made, ends, arrivals, stage_ranks, transport, hop):
    """When a message is where it is needed."""
    kind, source, target, chunk = message
    is_local = stage_ranks[source] == stage_ranks[target]
    if kind == "X" and (is_local or str(transport) == "implicit"):
        return 0
    if not is_local and str(transport) != "implicit":
        return arrivals[message]
    rank, position = made[kind, source, chunk]
    return ends[rank][position] + (0 if is_local else hop)
