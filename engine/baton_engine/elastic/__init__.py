"""Expert-parallel groups that change while they serve: generations, waves, placement of experts, their coordinator."""
