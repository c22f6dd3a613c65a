package hostenv

// TempDir is os.TempDir of this environment.
func TempDir() string {
	if dir := Get("TMPDIR"); dir != "" {
		return dir
	}
	return "/tmp"
}
