"""The fusions of dlp, one in each file. `dlp.ops.fusions.load_shipped` imports all files of this folder."""
