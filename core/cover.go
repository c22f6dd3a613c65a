package core

import (
	"fmt"
	"slices"
	"strings"

	"github.com/kvconn/kvconn/internal/fault"
)

// Source is a P rank that a D rank has met, and the regions that it holds.
type Source struct {
	Name   string // of the rank, for errors
	Shapes []Shape
}

// Cover deals a D rank's regions out to its sources. Each source gets the ascending list
// of the regions that are loaded from it, which is empty if other sources give them all. A
// region that several sources hold comes from the first of them. An error names the first
// region, and its first head, that no source has.
func Cover(mine []Shape, sources []Source) ([][]uint32, error) {
	type key struct {
		group uint32
		name  string
	}
	if fault.On("stage-by-place") {
		mine = slices.Clone(mine)
		nameByPlace(mine)
		for i := range sources {
			nameByPlace(sources[i].Shapes)
		}
	}
	out := make([][]uint32, len(sources))
	have := make([]map[key][]*Shape, len(sources))
	for i, s := range sources {
		have[i] = make(map[key][]*Shape, len(s.Shapes))
		for n := range s.Shapes {
			k := key{s.Shapes[n].Group, s.Shapes[n].Name}
			have[i][k] = append(have[i][k], &s.Shapes[n])
		}
	}
	for r := range mine {
		first, end := mine[r].heads()
		from := make([]int, end-first) // of each head: 1 + its source
		for i := range sources {
			gives, known := 0, 0
			theirs := have[i][key{mine[r].Group, mine[r].Name}]
			for _, s := range theirs {
				lo, hi := s.heads()
				for h := max(lo, first); h < min(hi, end); h++ {
					if gives++; from[h-first] != 0 {
						known++
					}
				}
			}
			switch {
			case gives == known: // other sources give all of it
				continue
			case known > 0:
				return nil, fmt.Errorf("region %q of group %d: prefill rank %s has %d heads that are wanted here, of which %d are with other ranks too: heads must be dealt out evenly, or all of them held twice",
					mine[r].Name, mine[r].Group, sources[i].Name, gives, known)
			}
			for _, s := range theirs {
				lo, hi := s.heads()
				for h := max(lo, first); h < min(hi, end); h++ {
					from[h-first] = i + 1
				}
			}
			out[i] = append(out[i], uint32(r))
		}
		for h, i := range from {
			if i == 0 {
				return nil, uncovered(&mine[r], first+uint32(h), sources)
			}
		}
	}
	return out, nil
}

func uncovered(s *Shape, head uint32, sources []Source) error {
	names := make([]string, len(sources))
	for i := range sources {
		names[i] = sources[i].Name
	}
	what := fmt.Sprintf("region %q of group %d", s.Name, s.Group)
	if first, end := s.heads(); end-first > 1 {
		what += fmt.Sprintf(", head %d", head)
	}
	return fmt.Errorf("%s: no rank of the prefill engine has it, asked were %s", what, strings.Join(names, ", "))
}
