// Several P ranks may hold a D rank's regions between them. Each region comes from the first rank that holds it, or its
// heads come from several.

package kv

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
				return nil, fmt.Errorf("region %q of group %d: this rank needs %[4]d heads of prefill rank %[3]s, but other prefill ranks have %[5]d of these too: no two ranks may share only a part of their heads",
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
	missing := fmt.Sprintf("region %q of group %d", s.Name, s.Group)
	if first, end := s.heads(); end-first > 1 {
		missing = fmt.Sprintf("head %d of %s", head, missing)
	}
	if name := nearest(s, sources); name != "" {
		missing += fmt.Sprintf(", but %q", name)
	}
	return fmt.Errorf("no rank of the prefill engine has %s; its ranks that this rank loads from are %s", missing, strings.Join(names, ", "))
}

// nearest is a name of the prefill engine that is most like that of a region that it lacks:
// the engine may mean the same layer, and have it in another way. It is empty if no name is
// like it in the first half.
func nearest(s *Shape, sources []Source) string {
	found, most := "", len(s.Name)/2
	for i := range sources {
		for j := range sources[i].Shapes {
			other := &sources[i].Shapes[j]
			n := 0
			for n < len(s.Name) && n < len(other.Name) && s.Name[n] == other.Name[n] {
				n++
			}
			if other.Group == s.Group && other.Name != s.Name && n > most {
				found, most = other.Name, n
			}
		}
	}
	return found
}
