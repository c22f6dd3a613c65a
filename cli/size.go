package cli

import (
	"fmt"
	"strconv"
	"strings"
)

// parseSize reads "4K", "16K", "1M", "256M" or a number of bytes.
func parseSize(s string) (int, error) {
	shift := 0
	num := s
	for suffix, sh := range map[string]int{"K": 10, "M": 20, "G": 30} {
		if n, ok := strings.CutSuffix(strings.ToUpper(s), suffix); ok {
			num, shift = n, sh
		}
	}
	n, err := strconv.Atoi(num)
	if err != nil || n <= 0 || n > 1<<40>>shift {
		return 0, fmt.Errorf("%w: size %q: want a number of bytes, or one with K, M or G", errUsage, s)
	}
	return n << shift, nil
}

func formatSize(n int) string {
	for _, u := range []struct {
		shift int
		name  string
	}{{30, "G"}, {20, "M"}, {10, "K"}} {
		if n >= 1<<u.shift && n%(1<<u.shift) == 0 {
			return fmt.Sprintf("%d%s", n>>u.shift, u.name)
		}
	}
	return strconv.Itoa(n)
}
