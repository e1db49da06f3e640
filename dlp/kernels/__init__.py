"""Raw operations on plain tensors: shapes and dtypes only; no module, recipe or process group.

`ops` is what the rest of the package calls; `reference` is the same set of operations in plain torch, written for
reading: the oracle of every kernel, and the path that runs where there is no kernel.
"""
