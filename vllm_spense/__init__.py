"""Serve pruned models in vLLM: 2:4-sparse, hybrid (SpenseGPT) and block-sparse checkpoints."""

__version__ = "0.1.0.dev0"


def register() -> None:
    """Entry point `vllm.general_plugins: spense`, called by vLLM in each of its processes.

    Imports late, may be called any number of times, and never raises: with a vLLM that it does not
    understand it logs one line and leaves vLLM as it was.
    """
    try:
        from vllm_spense.config import SpenseConfig

        SpenseConfig.register()
    except Exception:
        import logging

        logging.getLogger("vllm.spense").exception(
            "vllm-spense is installed but disabled: this vLLM could not be extended. "
            "Checkpoints with quant_method 'spense' will not load; other models are not affected."
        )
