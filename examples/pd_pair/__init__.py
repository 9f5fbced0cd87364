"""A prefill node and a decode node that decode speculatively, with draftgather between them: see docs/pd_pair.md.

A request's path: `prefill` computes its prompt and writes its KV and its draft row through the transfer engine;
`decode` assembles the rows that arrived, drafts, verifies and relays. `decoder` holds the steps that both nodes and
the one-process reference share, `model` the target and the draft head, `pair` starts the nodes, `compare` checks.
"""
