"""What other programs load to compile by memeff: one module per host, which imports the host.

    from memeff_compile.integrations.transformers import MemeffCallback   # Trainer, TRL's trainers
    from memeff_compile.integrations.accelerate import MemeffPlugin       # Accelerator
    from memeff_compile.integrations.lightning import MemeffCallback      # lightning.Trainer
    plugins: [memeff_compile.integrations.axolotl.MemeffPlugin]           # Axolotl's YAML
    --override.imports memeff_compile.integrations.torchtitan.fused_loss  # torchtitan

`integrations.trl` hands the output projection of TRL's trainers to the backend; the callback calls
it by itself. `import memeff_compile` imports nothing of this folder. A module raises ImportError
where its host is missing or too old, and names the version that it needs.
"""
