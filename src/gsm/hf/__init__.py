"""Models of this project as Hugging Face transformers models (extra ``hf``). Importing this package registers them.

    import gsm.hf
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained("exported")     # a folder written by export.py
    tokenizer = AutoTokenizer.from_pretrained("exported")
    model.generate(**tokenizer("def ", return_tensors="pt"), max_new_tokens=50)

An exported folder names this package as its code. So if the package is installed, ``trust_remote_code=True`` can
replace the import.
"""

from __future__ import annotations

from transformers import AutoConfig, AutoModelForCausalLM

from gsm.hf.config import GSMConfig
from gsm.hf.model import GSMForCausalLM

__all__ = ["GSMConfig", "GSMForCausalLM"]

AutoConfig.register(GSMConfig.model_type, GSMConfig, exist_ok=True)
AutoModelForCausalLM.register(GSMConfig, GSMForCausalLM, exist_ok=True)
