"""Operations on plain tensors. This package uses shapes and dtypes, but no modules, recipes or process groups.

Other packages call `ops`. `reference` contains the same operations in plain torch, which define the bits of the kernels and run
where there is no kernel. `table` lists all kernels.
"""
