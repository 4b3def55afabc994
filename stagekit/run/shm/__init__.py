"""CPU ranks of one host exchange tensors through shared memory, in the shape and with the meaning of gloo's transfers.

A send copies its tensor into the ring of its receiver and is over; the receiver copies it out when it waits for it, or for
a later one, into the tensor that was posted for its tag, or aside. That happens in the caller's thread. A large message,
and one that finds no room, is left to the helper threads of both sides, which copy while the callers compute: a send never
blocks, and what was posted for arrives whatever the callers do meanwhile, as with gloo.

`setup` decides who shares memory with whom and makes the rest; `outbox` and `inbox` are the two sides of one `ring`;
`helper` is the thread. Used by stagekit.run.groups.

Note [Few calls]: a tiny stage waits for little but Python, so the way of a small message is written out where that saves
a call (see Note [Calls] in stagekit.run.binding), and takes no lock, see `inbox.Inbox`.
"""
