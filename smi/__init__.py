"""SMI: training and running recurrent language models on State Model Interface streams.

Nothing is imported here, so that `import smi` costs nothing; import what you need from its parts:
`smi.protocol`, `smi.tokenizer`, `smi.data`, `smi.model`, `smi.training`, `smi.runtime`.
"""

__version__ = "0.1.0"
