"""MindSpeed and MindSpeed-LLM: the Megatron integration, switched on through MindSpeed's feature manager."""
