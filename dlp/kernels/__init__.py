"""Raw operations on plain tensors: shapes and dtypes only; no module, recipe or process group.

Other packages call `ops`. `reference` contains the same operations in plain torch, which define the bits of the kernels and run
where there is no kernel. `table` lists all kernels.
"""
