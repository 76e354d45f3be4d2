"""What other programs load to compile by memeff: one module per host, which imports the host.

Nothing here is imported with `memeff_compile`, and a module of this folder only when it is used:

    from memeff_compile.integrations.transformers import MemeffCallback   # Trainer, every TRL trainer
    from memeff_compile.integrations.accelerate import MemeffPlugin       # Accelerator(dynamo_plugin=)
    from memeff_compile.integrations.lightning import MemeffCallback      # lightning.Trainer
    plugins: [memeff_compile.integrations.axolotl.MemeffPlugin]           # Axolotl's YAML
    --override.imports memeff_compile.integrations.torchtitan.fused_loss  # torchtitan

`integrations.trl` hands the output projection of TRL's trainers to the backend; the callback calls
it by itself. A module raises ImportError, with the version that it needs, where its host is missing.
"""
