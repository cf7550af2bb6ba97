"""What the user says: meshes, specs, parameters, layouts, and placing values."""
