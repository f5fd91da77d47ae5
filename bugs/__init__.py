"""Planted bugs: what real systems got wrong, each as a change of source text, in text files by area.

    record     reads a file of bugs
    references reads the public issues that a record names
    anchors    finds the lines that a bug changes, by function and text
    planting   imports the changed packages beside the right ones
    repair     `python -m shardproof.bugs.repair` writes down where moved functions are now

A file holds one record a bug:

    norm-without-its-sum: Megatron #656: the sum over tp is left out       name, the real bug that it stands for
      at shardproof.parallel.layers.block:Norm.forward                      module and function, class, or nothing
      - total = all_reduce(total, axis)                                    the lines that change
      + total = total.clone()                                              what they read instead
      cases cp=2 seq=48 where tp>1 modes tensor isp(wp!=tp)                cases that show it
      fails activations alone in forward of layers.0.* as not_summed       what must be seen

Lines are found by their words alone: white space, line breaks and trailing commas may be others. Further `+` lines are
indented as the line where the old text begins. A line that is indented by four continues the one above.

    cases     words that every case has                   where    conditions on the drawn cases
    modes     modes (or groups of modes) that host it, each with conditions of its own
    fails     the check that must fail, `|` between several; `alone`: no other check fails
    in, of    phase and module of the first wrong place    as       causes that are right, `none` where each misleads
    equivalent, wrong, case, system                        why it cannot be seen; what is wrong; a case; who has it

A record that stands for a public issue names it as SYSTEM #N (`references.SYSTEMS` has the systems). A record that only
resembles one has `Megatron #656's kin`.

`defaults` begins what the following records have unless they say otherwise, `-` for nothing; `let X = words` is a name
for words in this file. Bugs in `held_back` are not for whoever writes rules of diagnosis.
"""
