"""Load a model from a folder or the Hugging Face Hub, in the class that config.json names."""

from __future__ import annotations

from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

from memeff_compile.errors import MemeffError, OptionError


def from_pretrained(name: str | PathLike[str], **settings: Any) -> Any:  # noqa: ANN401 - a model
    """Load a model that `save_pretrained` wrote, compressed or not, in the class from which it was
    saved.

    The function calls the `from_pretrained` of transformers. If the saved model is compressed, its
    codes are loaded without decoding. If you pass a `MemeffConfig`, dense weights are compressed
    one by one as they are read. Buffers that no checkpoint contains get their values from the
    model's own code. After memeff_compile was imported, `AutoModelForCausalLM.from_pretrained`
    handles codes, a `MemeffConfig` and such buffers in the same way.

    Args:
        name: a folder, or a name on the Hugging Face Hub.
        settings: all arguments of transformers' `from_pretrained`, such as `quantization_config`,
            `device_map`, `dtype` and `revision`.

    Raises:
        OptionError: `name` is the path of a file instead of a folder.
        CodedWeightError: The folder is damaged, has an unsupported format version, or does not
            match the model.
        MemeffError: The package transformers is missing.

    Example:
        >>> model = memeff_compile.from_pretrained("folder")  # doctest: +SKIP
    """
    if Path(name).is_file():
        raise OptionError(
            f"from_pretrained was given {name}, a file. It needs a folder with a config.json, as "
            "model.save_pretrained(folder) writes. Load a file of save_compressed into a model "
            "that you have made: memeff_compile.load_compressed_(model, file)."
        )
    try:
        transformers: Any = import_module("transformers")
    except ImportError:
        raise MemeffError(
            "from_pretrained loads models of transformers, and the package transformers is not "
            "installed. Install memeff_compile[transformers]."
        ) from None
    given = {key: each for key, each in settings.items() if key != "quantization_config"}
    config, _ = transformers.PretrainedConfig.get_config_dict(name, **given)
    kinds = config.get("architectures") or [""]
    is_theirs = not settings.get("trust_remote_code") or "auto_map" not in config
    kind = getattr(transformers, kinds[0], None) if is_theirs else None
    return (kind or transformers.AutoModelForCausalLM).from_pretrained(name, **settings)
