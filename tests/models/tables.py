"""All tables, by package. Nothing of a package is imported before a row's ``build`` is called."""

import diffusers_models
import litgpt_models
import opacus_models
import peft_models
import quantised_models
import timm_models
import torchaudio_models
import torchvision_models
import transformers_models
import x_transformers_models
from refusals import FAULTS, REFUSED

_TABLES = {
    "transformers": transformers_models,
    "timm": timm_models,
    "torchvision": torchvision_models,
    "diffusers": diffusers_models,
    "x-transformers": x_transformers_models,
    "litgpt": litgpt_models,
    "PEFT": peft_models,
    "PEFT on quantised weights": quantised_models,
    "torchaudio": torchaudio_models,
    "Opacus": opacus_models,
}

PACKAGES = {
    package: {
        name: row._replace(refused=REFUSED.get((package, name)), fault=FAULTS.get((package, name)))
        for name, row in table.MODELS.items()
    }
    for package, table in _TABLES.items()
}

ALL = [(package, name) for package, models in PACKAGES.items() for name in models]

_FAST = "gpt2 llama bert t5 vit albert bloom deberta-v2 distilbert convnext resnet clip_text_model mamba bart ctrl swin"

FAST = [("transformers", name) for name in _FAST.split()]
"""What `make test` takes: a package that it has installed anyway, models of each kind."""

_STRAY = (REFUSED.keys() | FAULTS.keys()) - set(ALL)
assert not _STRAY, f"refusals or faults of no row: {_STRAY}"
