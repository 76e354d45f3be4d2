"""Integrations with other frameworks: each module makes one framework compile its models with this
backend.

    from memeff_compile.integrations.transformers import MemeffCallback   # Trainer, TRL's trainers
    from memeff_compile.integrations.accelerate import MemeffPlugin       # Accelerator
    from memeff_compile.integrations.lightning import MemeffCallback      # lightning.Trainer
    plugins: [memeff_compile.integrations.axolotl.MemeffPlugin]           # Axolotl's YAML
    --override.imports memeff_compile.integrations.torchtitan.fused_loss  # torchtitan

The function `hand_over_head` in `integrations.trl` lets the backend compute the loss of TRL's
trainers. The `MemeffCallback` in `integrations.transformers` calls this function. `import
memeff_compile` does not import this folder. Each module of this folder imports its framework. If
the framework is missing or too old, the module raises ImportError and names the required version.
"""
