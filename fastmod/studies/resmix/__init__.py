"""ResMixNet beside nets without modules: relations between shapes, and photographs."""
