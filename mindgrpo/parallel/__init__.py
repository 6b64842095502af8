"""Where ranks stand in the mesh and which part of each parameter they hold."""
