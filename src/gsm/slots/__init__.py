"""The exchangeable parts of GSM, one module or folder for each group of `configs/model/`."""
